"""`--fetch-media`: images by address, on the whole product, from a server on this machine with harmless files."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from middleware_hub.media.fetching import Fetcher
from router.config import MediaConfig
from router.errors import BadRequestError
from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
FOLDER = shipped_image_tokenizer()
CAT, DOG = (picture(40, 30, seed) for seed in (31, 32))
PAD = "<|image_pad|>"
LIMIT, SECONDS = 100_000, 1.0


class Files(BaseHTTPRequestHandler):
    """`/cat` and `/dog` are pictures; `/to/...` redirects; the others answer badly."""

    server: Site
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        name = self.path.partition("?")[0].removeprefix("/")
        with contextlib.suppress(OSError):
            if name in ("cat", "dog"):
                self._answer(CAT if name == "cat" else DOG)
            elif name == "text":
                self._answer(b"no image at all")
            elif name.startswith("to/"):
                self.send_response(302)
                self.send_header("location", self.path.removeprefix("/to/"))
                self.send_header("content-length", "0")
                self.end_headers()
            elif name == "half":
                self._answer(CAT[:-20], len(CAT))
                self.close_connection = True
            elif name == "large":
                self._answer(CAT + bytes(LIMIT))
            elif name in ("endless", "slow"):
                self.send_response(200)
                self.end_headers()
                while not self.server.over.wait(0.001 if name == "endless" else 0.2):
                    self.wfile.write(CAT if name == "endless" else b"\x89")
            else:
                self.send_error(404)

    def _answer(self, content: bytes, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Site(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Files)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.over = threading.Event()
        self.url = f"http://{host}:{self.server_address[1]}"


@contextlib.contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[Site]:
    with Site(host) as site:
        thread = threading.Thread(target=site.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield site
        finally:
            site.over.set()
            site.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    media = {
        "fetch": True,
        "fetch_private": ("127.0.0.1/32",),
        "fetch_timeout": SECONDS,
        "max_image_bytes": LIMIT,
    }
    with stack("qwen", styles=("cumulative",), folder=FOLDER, media=media) as made:
        yield made


def generated(*urls: str) -> Json:
    text = f"Look: {PAD} " * len(urls)
    return {"text": text, "image_data": list(urls), "sampling_params": {"max_new_tokens": 2, "temperature": 0}}


CHATS: dict[str, Any] = {
    "/v1/chat/completions": lambda url: {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
        "max_tokens": 2,
    },
    "/v1/responses": lambda url: {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        "max_output_tokens": 2,
        "model": "m",
    },
    "/v1/messages": lambda url: {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}],
        "max_tokens": 2,
        "model": "m",
    },
}


def test_an_image_by_address_is_the_image_of_its_bytes(served: Stack, site: Site) -> None:
    """The worker gets the file, and never the address; the same bytes sent by a client are the same image."""
    site.asked.clear()
    body = generated(f"{site.url}/cat?a=1#here", data_url(DOG), f"{site.url}/cat?a=1#here")
    record = served.generate(body).record
    assert record.images == (digest(CAT), digest(DOG), digest(CAT))
    ((path, headers),) = site.asked  # twice in a request is fetched once
    assert path == "/cat?a=1"
    assert not {"authorization", "cookie", "x-api-key", "referer"} & {name.lower() for name in headers}
    text = body["text"] + record.text
    found = served.retrieve(text, image_data=[data_url(CAT), digest(DOG), f"{site.url}/cat"])
    assert found["exact"]
    assert found["tokens"] == record.input_ids + record.output_ids


@pytest.mark.parametrize("path", CHATS)
def test_every_dialect_takes_addresses(served: Stack, site: Site, path: str) -> None:
    name = served.post("/sessions", {}).json()["session_id"]
    for place in (path, f"/sessions/{name}{path}")[path == "/v1/responses" :]:
        answer = served.post(place, CHATS[path](f"{site.url}/dog"))
        assert answer.status == 200, answer.content
        assert served.workers[0].log[-1].images == (digest(DOG),)
    (found,) = served.post(f"/sessions/{name}/finalize", {}).json()["trajectories"]
    assert [one["digest"] for one in found["multi_modal_data"]["images"]] == [digest(DOG)]
    assert site.url not in str(found)


def test_count_tokens_takes_addresses(served: Stack, site: Site) -> None:
    body = CHATS["/v1/messages"](f"{site.url}/dog")
    answer = served.post("/v1/messages/count_tokens", body)
    assert answer.status == 200, answer.content


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("text", "media_invalid", "no PNG"),
        ("large", "media_invalid", "larger than"),
        ("endless", "media_invalid", "larger than"),
        ("slow", "media_url", "within 1 s"),
        ("half", "media_url", "cannot be fetched"),
        ("nothing", "media_url", "404"),
        ("to/" * 9 + "cat", "media_url", "redirects"),
        ("to/file:///cat", "media_url", "http and https"),
        ("to/http://user@127.0.0.1/cat", "media_url", "user name"),
    ],
)
def test_a_bad_answer_is_told_in_time(served: Stack, site: Site, path: str, code: str, words: str) -> None:
    before, begun = served.workers[0].received, time.monotonic()
    for place, body in (
        ("/generate", generated(f"{site.url}/{path}")),
        ("/v1/chat/completions", CHATS["/v1/chat/completions"](f"{site.url}/{path}")),
    ):
        answer = served.post(place, body)
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (400, code), error
        assert words in error["message"]
    assert time.monotonic() - begun < 2 * SECONDS + 5
    assert served.workers[0].received == before


def test_a_redirect_is_followed_to_where_the_first_address_may_be(served: Stack, site: Site) -> None:
    assert served.generate(generated(f"{site.url}/to//cat")).record.images == (digest(CAT),)
    assert served.generate(generated(f"{site.url}/to/{site.url}/cat")).record.images == (digest(CAT),)
    with serving("127.0.0.2") as other:
        for url in (f"{other.url}/cat", f"{site.url}/to/{other.url}/cat"):
            answer = served.post("/generate", generated(url))
            assert (answer.status, answer.json()["error"]["code"]) == (400, "media_url")
        assert other.asked == []


def test_only_public_addresses_without_a_flag(site: Site) -> None:
    """By number and by name."""
    port = site.server_address[1]
    site.asked.clear()
    with stack("qwen", styles=("cumulative",), folder=FOLDER, media={"fetch": True, "fetch_timeout": 3.0}) as served:
        for url in (f"{site.url}/cat", f"http://localhost:{port}/cat"):
            answer = served.post("/generate", generated(url))
            assert (answer.status, answer.json()["error"]["code"]) == (400, "media_url")
            assert "no public address" in answer.json()["error"]["message"]
    assert site.asked == []


def test_only_the_named_hosts(site: Site) -> None:
    port = site.server_address[1]
    media = {"fetch": True, "fetch_private": ("127.0.0.0/8", "::1/128"), "fetch_hosts": ("LocalHost", "b.example")}
    with stack("qwen", styles=("cumulative",), folder=FOLDER, media=media) as served:
        assert served.generate(generated(f"http://localhost:{port}/cat")).record.images == (digest(CAT),)
        site.asked.clear()
        answer = served.post("/generate", generated(f"{site.url}/cat"))
        assert (answer.status, answer.json()["error"]["code"]) == (400, "media_url")
        assert "--fetch-media-host" in answer.json()["error"]["message"]
        assert site.asked == []
        answer = served.post("/generate", generated(f"http://localhost:{port}/to/{site.url}/cat"))
        assert (answer.status, answer.json()["error"]["code"]) == (400, "media_url")
        assert len(site.asked) == 1


@pytest.mark.parametrize(
    "url", ["http://", "http:///cat", "http://a b/cat", "http://127.0.0.1:99999/cat", "https://a\u0001"]
)
def test_a_malformed_address_is_told(served: Stack, url: str) -> None:
    answer = served.post("/generate", generated(url))
    assert (answer.status, answer.json()["error"]["code"]) == (400, "media_url"), answer.content


@pytest.mark.parametrize("url", ["file:///cat", "ftp://127.0.0.1/cat", "/cat", "cat.png"])
def test_other_schemes_and_paths_stay_refused(served: Stack, url: str) -> None:
    answer = served.post("/generate", generated(url))
    assert (answer.status, answer.json()["error"]["code"]) == (400, "media_url")


def test_without_the_flag_nothing_is_fetched(site: Site) -> None:
    site.asked.clear()
    with stack("qwen", styles=("cumulative",), folder=FOLDER) as served:
        assert served.post("/generate", generated(f"{site.url}/cat")).json()["error"]["code"] == "media_url"
        name = served.post("/sessions", {}).json()["session_id"]
        for path, body in CHATS.items():
            answer = served.post(f"/sessions/{name}{path}", body(f"{site.url}/cat"))
            assert answer.status == 400
            assert "media_url" in str(answer.json())
    assert site.asked == []


def test_the_files_of_a_request_are_limited_together(site: Site) -> None:
    media = {"fetch": True, "fetch_private": ("127.0.0.1/32",), "max_request_bytes": len(CAT) + len(DOG) - 1}
    with stack("qwen", styles=("cumulative",), folder=FOLDER, media=media) as served:
        served.generate(generated(f"{site.url}/cat"))
        for images in ([f"{site.url}/cat", f"{site.url}/dog"], [f"{site.url}/cat", data_url(DOG)]):
            error = served.post("/generate", generated(*images)).json()["error"]
            assert error["code"] == "media_invalid"
            assert "--media-max-request-bytes" in error["message"]
        # Not even one that never ends is read further than that.
        error = served.post("/generate", generated(f"{site.url}/endless")).json()["error"]
        assert "--media-max-request-bytes" in error["message"]
        many = served.post("/generate", generated(*(f"{site.url}/{number}" for number in range(300))))
        assert many.json()["error"]["code"] == "media_url"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *[("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True)],
        *[(one, False) for one in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.1.1", "0.0.0.0")],
        *[
            (one, False)
            for one in ("100.64.0.1", "224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1%eth0", "fc00::1")
        ],
        *[("::ffff:127.0.0.1", False), ("::ffff:93.184.216.34", True), ("64:ff9b::a00:1", False), ("ff02::1", False)],
        *[("2002:a00:1::1", False), ("64:ff9b::5db8:d822", False)],
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert Fetcher(MediaConfig(fetch=True)).permits(address) is public


def test_a_private_network_may_be_permitted() -> None:
    permits = Fetcher(MediaConfig(fetch=True, fetch_private=("10.0.0.0/8", "fd00::/8"))).permits
    assert all(map(permits, ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1")))
    assert not any(map(permits, ("192.168.1.1", "127.0.0.1", "fc00::1")))


@pytest.mark.parametrize(
    "wrong",
    [
        {"fetch_hosts": ("a",)},
        {"fetch_private": ("10.0.0.0/8",)},
        {"fetch": True, "fetch_private": ("10.0.0.1/8",)},
        {"fetch": True, "fetch_private": ("all",)},
        {"fetch": True, "fetch_hosts": ("http://a",)},
        {"fetch": True, "fetch_hosts": ("",)},
        {"fetch": True, "fetch_timeout": 0.0},
    ],
)
def test_wrong_flags_are_refused_at_the_start(wrong: Json) -> None:
    with pytest.raises(BadRequestError, match="--fetch-media"):
        MediaConfig(**wrong)


def test_a_host_that_takes_no_connections_is_told(served: Stack) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        answer = served.post("/generate", generated(f"http://127.0.0.1:{taken.getsockname()[1]}/cat"))
    assert (answer.status, answer.json()["error"]["code"]) == (400, "media_url")
