"""The format of the log."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

from router.http.request_state import REQUEST_ID
from router.observability.logs import JsonFormatter, TextFormatter
from tests.router.conftest import EchoWorker, GatedWorker
from tests.router.test_cli import Process
from tests.support.serving import serving
from tests.support.usual import usual

MOMENT = datetime(2031, 5, 6, 7, 8, 9, 123456, UTC)


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    made = logging.LogRecord("router.proxy.proxy", logging.WARNING, "file.py", 1, message, args, None)
    made.created = MOMENT.timestamp()
    if error is not None:
        try:
            raise error
        except BaseException:  # noqa: BLE001 - for its traceback
            made.exc_info = sys.exc_info()
    return made


@pytest.fixture
def in_request() -> Any:
    token = REQUEST_ID.set("abc")
    yield
    REQUEST_ID.reset(token)


def test_json_is_one_object_per_line() -> None:
    line = JsonFormatter().format(record('worker %s\nis "gone"', "http://a:1"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2031-05-06T07:08:09.123+00:00",
        "level": "WARNING",
        "logger": "router.proxy.proxy",
        "message": 'worker http://a:1\nis "gone"',
    }
    assert datetime.fromisoformat(json.loads(line)["time"]) == MOMENT.replace(microsecond=123000)


@pytest.mark.usefixtures("in_request")
def test_json_names_the_request_and_has_tracebacks() -> None:
    line = JsonFormatter().format(record("failed", error=ZeroDivisionError("by zero")))
    assert "\n" not in line
    found = json.loads(line)
    assert found["request_id"] == "abc"
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ZeroDivisionError: by zero")


@pytest.mark.parametrize("odd", ["\ud800", "ünï \x00 \u2028", "\udcff/file"])
def test_json_takes_any_text(odd: str) -> None:
    line = JsonFormatter().format(record("%s", odd))
    assert "\n" not in line
    assert json.loads(line)["message"] == odd.encode("utf-8", "backslashreplace").decode()


def test_text_without_a_request_is_plain() -> None:
    line = TextFormatter().format(record("worker %s", "a"))
    assert line.endswith(" WARNING router.proxy.proxy: worker a")


@pytest.mark.usefixtures("in_request")
def test_text_names_the_request() -> None:
    first, *below = TextFormatter().format(record("failed", error=ZeroDivisionError())).splitlines()
    assert first.endswith(" WARNING router.proxy.proxy [abc]: failed")
    assert below[0].startswith("Traceback")
    assert below[-1] == "ZeroDivisionError"


@pytest.mark.parametrize("odd", ["\n", "\r", "\x1b[2J", "\x85", "\u2028"])
def test_text_is_one_line_whatever_a_client_or_a_worker_wrote(odd: str) -> None:
    """Nobody can write a line of the log that looks like the router's own."""
    line = TextFormatter().format(record("GET /x%s2031-05-06 ERROR made up", odd))
    assert line.isprintable()
    assert line.endswith("ERROR made up")


def lines(process: Process) -> list[str]:
    return "".join(process.log).splitlines()


def test_a_process_logs_json_and_at_debug_one_line_per_request() -> None:
    async def run() -> None:
        async with (
            serving(EchoWorker()) as url,
            Process("--log-format", "json", "--log-level", "debug", "--worker-urls", url) as process,
            aiohttp.ClientSession(process.url.rstrip('"}')) as client,
        ):
            async with client.post("/generate", data=b"{}", headers={"x-request-id": "first"}) as reply:
                assert reply.status == 200
            async with client.get("/workers/none", headers={"x-request-id": "second"}) as reply:
                assert reply.status == 404
            await process.line_with(r"GET /workers/none")
        entries = [json.loads(line) for line in lines(process)]
        assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)
        by_request = {
            entry["request_id"]: entry["message"] for entry in entries if entry["logger"] == "router.serving.entrance"
        }
        assert by_request.keys() == {"first", "second"}
        assert by_request["first"].startswith("POST /generate 200 0.")
        assert by_request["first"].endswith(f" s {url}")
        assert by_request["second"].startswith("GET /workers/none 404 0.")

    asyncio.run(run())


@pytest.mark.parametrize("log_format", usual(["text", "json"], "json"))
def test_a_broken_reply_is_one_line_with_its_request(log_format: str) -> None:
    async def run() -> None:
        worker = GatedWorker(first=b"data: 1\n\n")
        async with Process("--log-format", log_format) as process:
            async with aiohttp.ClientSession(process.url.rstrip('"}')) as client:
                async with serving(worker) as url:
                    async with client.post("/add_worker", params={"url": url}) as added:
                        assert added.status == 200
                    stream = await client.post("/generate", data=b"{}", headers={"x-request-id": "the-one"})
                    assert await stream.content.readany() == b"data: 1\n\n"
                with pytest.raises(aiohttp.ClientPayloadError):
                    await stream.read()
            await process.line_with("reply broken off")
        (line,) = (line for line in lines(process) if "reply broken off" in line)
        assert "the-one" in line
        assert "Traceback" not in "".join(process.log)

    asyncio.run(run())


def test_the_process_has_no_series_for_creation_times() -> None:
    async def run() -> None:
        async with Process() as process, aiohttp.ClientSession(process.url) as client:
            for _ in range(2):
                async with client.get("/metrics") as reply:
                    text = await reply.text()
        assert "tito_router_requests_total" in text
        assert "_created" not in text

    asyncio.run(run())
