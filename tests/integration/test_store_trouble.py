"""A real router and a store that is in trouble: a clear message and exit code 2, or replies that say what they lack."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from middleware_hub.client import Client
from middleware_hub.store.errors import NOT_SAVED_COMMENT
from middleware_hub.store.sqlite.file import connect
from tests.integration.test_killed_routers import TOLD, Answered
from tests.support import templates
from tests.support.client import Answer, call
from tests.support.engine_server import free_port
from tests.support.fleet import until
from tests.support.programs import Program
from tests.support.vocabularies import Name, vocabulary
from worker.worker import EmbeddedWorker

NAME = "store.sqlite3"


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(vocabulary("qwen"), stream_style="cumulative") as made:
        yield made


def router(worker: EmbeddedWorker, store: Path | str, folder: Path, *more: str, name: Name = "qwen") -> Program:
    flags = ["--tokenizer-path", str(vocabulary(name)), "--store", f"sqlite:{store}", "--verify-rate", "1", *more]
    return Program("router", "--worker-urls", worker.url, *flags, folder=folder)


def say(url: str, text: str, tokens: int = 12) -> tuple[Answer, Answered]:
    answer = call(f"{url}/generate", {"text": text, **TOLD, "sampling_params": {"max_new_tokens": tokens}})
    assert answer.status == 200, answer.content
    return answer, Answered.of(text, answer.json())


def talk(url: str, turns: int) -> list[Answered]:
    """Return the replies of a conversation."""
    found, text = [], "Once upon a time: "
    for number in range(turns):
        found.append(say(url, text)[1])
        text = f"{found[-1].text} And {number}: "
    return found


def retrieve(url: str, text: str) -> Any:
    answer = call(f"{url}/retrieve_from_text", {"text": text, "return_logp": True})
    assert answer.status == 200, answer.content
    return answer.json()


def filled(worker: EmbeddedWorker, folder: Path) -> list[Answered]:
    """Make a store with a conversation in it."""
    with router(worker, f"{folder}/store/", folder) as made:
        made.wait_until_up()
        said = talk(made.url, 4)
        made.terminate()
        assert made.exit_code() == 0
    return said


def change(folder: Path, statement: str) -> None:
    connection = connect(folder / "store" / NAME)
    with connection:
        connection.execute(statement)
    connection.close()


@pytest.fixture(scope="module")
def stored(worker: EmbeddedWorker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    filled(worker, folder)
    return folder


class TestRefusedAtStart:
    """Nothing was served, nothing was written."""

    def refused(self, program: Program, words: str) -> None:
        with program:
            assert program.exit_code() == 2, program.log
            last = program.log.strip().splitlines()[-1]
            assert last.startswith("tito-router: error: "), program.log
            assert words in last, program.log
            assert "Traceback" not in program.log, program.log
            assert "uvicorn" not in program.log, program.log

    @pytest.mark.slow
    def test_another_tokenizer(self, worker: EmbeddedWorker, stored: Path, tmp_path: Path) -> None:
        """A second router with another tokenizer is refused, too, and the first goes on."""
        with router(worker, f"{stored}/store/", stored) as first:
            first.wait_until_up()
            before = (stored / "store" / NAME).stat().st_size
            self.refused(router(worker, f"{stored}/store/", tmp_path, name="mistral-v1"), "another tokenizer")
            assert (stored / "store" / NAME).stat().st_size == before
            (said,) = talk(first.url, 1)
            said.check(retrieve(first.url, said.text))

    def test_a_newer_format(self, worker: EmbeddedWorker, stored: Path) -> None:
        change(stored, "PRAGMA user_version = 99")
        try:
            self.refused(router(worker, f"{stored}/store/", stored), "update the router")
        finally:
            change(stored, "PRAGMA user_version = 2")

    def test_a_file_of_something_else(self, worker: EmbeddedWorker, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("these are notes\n" * 1000)
        self.refused(router(worker, tmp_path / "notes.txt", tmp_path), "name another path")
        assert (tmp_path / "notes.txt").read_text() == "these are notes\n" * 1000

    def test_a_place_where_no_file_can_be(self, worker: EmbeddedWorker, tmp_path: Path) -> None:
        self.refused(router(worker, "/proc/none/store.sqlite3", tmp_path), "cannot be made")


def test_a_start_that_waits_for_its_store_can_be_stopped(worker: EmbeddedWorker, tmp_path: Path) -> None:
    flags = ["--tokenizer-path", str(vocabulary("qwen")), "--store", f"redis://127.0.0.1:{free_port()}/0"]
    with Program("router", "--worker-urls", worker.url, *flags, folder=tmp_path) as made:
        until(lambda: "waiting for the store" in made.log, "it waits")
        made.terminate()
        assert made.exit_code() == 0, made.log
        assert "stopped before anything was served" in made.log
        assert "Traceback" not in made.log, made.log


def limit_files(program: Program, size: int | None) -> None:
    """Let no file of a process grow beyond this; None takes the limit away."""
    _, hard = resource.prlimit(program.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


@pytest.mark.slow
def test_no_room_for_a_while(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """Replies say that they are not saved, and are retrieved here all the same; once there is room, they outlive a kill."""
    with router(worker, f"{tmp_path}/store/", tmp_path) as made:
        made.wait_until_up()
        said = talk(made.url, 2)
        limit_files(made, (tmp_path / "store" / f"{NAME}-wal").stat().st_size)
        for number in range(20):
            answer, one = say(made.url, f"Without room, {number}: ")
            assert answer.headers.get("x-radix-saved") == "no"
            said.append(one)
        further = say(made.url, f"{said[-1].text} and on: ")[1]
        assert further.sent[: len(said[-1].chain)] == said[-1].chain
        said.append(further)
        for one in said:
            one.check(retrieve(made.url, one.text))
        assert "are answered without being saved" in made.log
        assert made.log.count("are answered without being saved") == 1, "it is logged once a minute"
        limit_files(made, None)
        until(lambda: "takes writes again" in made.log, "what waited is handed over")
        answer, one = say(made.url, "With room: ")
        assert "x-radix-saved" not in answer.headers
        said.append(one)
        made.kill()
        made.start()
        made.wait_until_up()
        for one in said:
            one.check(retrieve(made.url, one.text))


@pytest.mark.slow
def test_a_stream_tells_before_its_last_event_that_it_is_not_saved(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """Its head was sent before that was known. Clients of both dialects read the stream as always."""
    template = str(templates.folder() / "qwen2_5.jinja")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 9, "model": "m"}
    streams = {
        "/generate": {"text": "Go on: ", "sampling_params": {"max_new_tokens": 9}, "stream": True},
        "/generate batch": {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 9}, "stream": True},
        "/v1/completions": {"prompt": "Go on: ", "max_tokens": 9, "model": "m", "stream": True},
        "/sessions/s/v1/chat/completions": {**asked, "stream": True},
        "/sessions/s/v1/messages": {**asked, "stream": True},
    }

    def saved(url: str) -> tuple[bool, bool]:
        with Client(url) as client:
            *_, last = client.stream("Go on: ", {"max_new_tokens": 9})
            assert last.last is not None
            return last.last.saved, client.generate("Go on: ", {"max_new_tokens": 9}).saved

    def events(url: str, path: str) -> list[bytes]:
        answer = call(url + path.split()[0], streams[path])
        assert answer.status == 200, answer.content
        return answer.content.strip().split(b"\n\n")

    with router(worker, f"{tmp_path}/store/", tmp_path, "--chat-template", template) as made:
        made.wait_until_up()
        assert call(f"{made.url}/sessions", {"session_id": "s"}).status == 201
        for path in streams:
            assert NOT_SAVED_COMMENT.strip() not in events(made.url, path), path
        limit_files(made, (tmp_path / "store" / f"{NAME}-wal").stat().st_size)
        for path in streams:
            found = events(made.url, path)
            assert found.count(NOT_SAVED_COMMENT.strip()) == 1, path
            assert b"[DONE]" in found[-1] or b"message_stop" in found[-1]
        assert saved(made.url) == (False, False)
        openais = openai.OpenAI(base_url=f"{made.url}/sessions/s/v1", api_key="none")
        pieces = list(
            openais.chat.completions.create(**{**streams["/sessions/s/v1/chat/completions"], "max_tokens": 5})
        )
        assert pieces[-1].choices[0].finish_reason == "length"
        claude = anthropic.Anthropic(base_url=f"{made.url}/sessions/s", api_key="none")
        with claude.messages.stream(model="m", max_tokens=5, messages=asked["messages"]) as stream:
            assert stream.get_final_message().stop_reason == "max_tokens"
        limit_files(made, None)
        until(lambda: "takes writes again" in made.log, "what waited is handed over")
        for path in streams:
            assert NOT_SAVED_COMMENT.strip() not in events(made.url, path), path
        assert saved(made.url) == (True, True)


@pytest.mark.slow
def test_what_waits_for_room_at_the_end_is_said(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """A router that stops while its disk is full says how much it could not write.

    Its log is as short as all its files may be, so it must have nothing to say of the spools of others.
    """
    with router(worker, f"{tmp_path}/store/", tmp_path, "--store-spool", str(tmp_path / "spool")) as made:
        made.wait_until_up()
        said = talk(made.url, 1)
        limit_files(made, 4096)
        say(made.url, "Lost: ")
        made.terminate()
        assert made.exit_code() == 0
        assert "1 replies could not be written" in made.log
        made.start()
        made.wait_until_up()
        said[0].check(retrieve(made.url, said[0].text))


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [0, 2])
def test_a_damaged_record_is_told(worker: EmbeddedWorker, tmp_path: Path, damaged: int) -> None:
    """What comes before it is exact. What builds on it is not, and says so each time; no token is wrong."""
    said = filled(worker, tmp_path)
    connection = connect(tmp_path / "store" / NAME)
    rows = connection.execute("SELECT n, body FROM records ORDER BY n").fetchall()
    n, body = rows[2 * damaged + 1]  # each turn is a context and a reply
    with connection:
        spoilt = (body[:-1] + bytes((body[-1] ^ 1,)), n)
        connection.execute("UPDATE records SET body = ? WHERE n = ?", spoilt)
        assert connection.changes() == 1
    connection.close()
    with router(worker, f"{tmp_path}/store/", tmp_path) as made:
        made.wait_until_up()
        for one in said[:damaged]:
            one.check(retrieve(made.url, one.text))
        for one in said[damaged:] * 2:
            found = retrieve(made.url, one.text)
            assert (found["exact"], "store_unreachable" in found["reasons"]) == (False, True), found["reasons"]
            sampled = [at for at, mask in enumerate(found["loss_mask"]) if mask]
            assert [found["tokens"][at] for at in sampled] == [one.chain[at] for at in sampled]
        whole = said[damaged - 1].chain if damaged else []
        again = say(made.url, f"{said[-1].text} and on: ")[1]
        assert again.sent[: len(whole)] == whole
        assert retrieve(made.url, again.text)["exact"] is False
        assert "store verify" in made.log
