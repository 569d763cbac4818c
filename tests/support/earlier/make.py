"""Write the stores of an earlier commit into this folder: `python -m tests.support.earlier.make CHECKOUT NAME`.

The router of that checkout plays conversations of every kind over SQLite and over Redis, and is killed. Kept are the file, the
keys, what the worker sampled, and a spool file with what waited for a store that was locked. Tests read them with the router of
today: `tests/integration/test_earlier_stores.py` and `tests/middleware_hub/store/spool/test_earlier.py`. With
`--images` it writes a store with images, of a commit that kept none of their files: `tests/integration/test_earlier_images.py`.
Make further ones when the stored format changes, and keep those that are there: somewhere such a store is still in use.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import apsw
import hiredis

from tests.support.engine_server import free_port
from tests.support.pictures import data_url, picture
from tests.support.redis_server import empty_redis
from worker.demo.rollout import call
from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer
from worker.options import WorkerOptions
from worker.worker import EmbeddedWorker

FOLDER = Path(__file__).parent
FIRST_VERSION, NEW_VERSION = "1", "2"
TENANT = {"x-radix-namespace": "another"}
QUESTIONS = ("The cat sat on the mat. <think>" * 20, " 京都 🐟?", " And then, é?")


class Play:
    """Conversations with a router, and what is to be known of them later.

    Attributes:
        known: texts with the ids of their replies, by namespace; the sessions; the generations of a chat without a session,
            and its messages.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.known: dict[str, Any] = {"texts": [], "sessions": [], "chat": {}}

    def all(self) -> None:
        """Play everything: new weights come in the middle."""
        self._texts({})
        self._texts(TENANT)
        live, finalized = self._session(), self._session()
        self.known["sessions"] = [live, finalized]
        call(self._url, "/update_weights_from_disk", {"model_path": "m", "weight_version": NEW_VERSION})
        for session in (live, finalized):
            self._turn(session, "And after that?")
        reward = {"reward_info": {"score": 0.5}, "branch": finalized["generations"][-1]}
        call(self._url, f"/sessions/{finalized['id']}/reward_info", reward)
        call(self._url, f"/sessions/{finalized['id']}/finalize", {})
        self.known["chat"] = chat = {"generations": [], "messages": []}
        for content in QUESTIONS[:2]:
            self._chat("/v1/chat/completions", chat, content)
        self._group()

    def _texts(self, tenant: Mapping[str, str]) -> None:
        """Play a conversation that forks at its second turn; one of the replies is cut by a stop string."""
        replies: list[str] = []
        first = self.say(QUESTIONS[0], replies, tenant)
        for seed in (1, 2):
            branch = list(replies)
            text = self.say(first + QUESTIONS[1], branch, tenant, sampling_seed=seed, stop=["e"])
            text = self.say(text + QUESTIONS[2], branch, tenant)
            self.known["texts"].append({"text": text, "replies": branch, "tenant": dict(tenant)})

    def say(self, text: str, replies: list[str], headers: Mapping[str, str], **more: Any) -> str:
        body = {"text": text, "sampling_params": {"max_new_tokens": 12, **more}}
        reply = call(self._url, "/generate", body, dict(headers))[1]
        replies.append(reply["meta_info"]["id"])
        return text + str(reply["text"])

    def _session(self) -> dict[str, Any]:
        session: dict[str, Any] = {"generations": [], "messages": []}
        session["id"] = call(self._url, "/sessions", {})[1]["session_id"]
        for content in QUESTIONS[:2]:
            self._turn(session, content)
        return session

    def _turn(self, session: dict[str, Any], content: str) -> None:
        self._chat(f"/sessions/{session['id']}/v1/chat/completions", session, content)

    def _chat(self, path: str, chat: dict[str, Any], content: str) -> None:
        chat["messages"].append({"role": "user", "content": content})
        reply = call(self._url, path, {"model": "m", "messages": chat["messages"], "max_tokens": 12})[1]
        chat["messages"].append(reply["choices"][0]["message"])
        chat["generations"].append(reply["id"].removeprefix("chatcmpl-"))

    def _group(self) -> None:
        for number in range(2):
            headers = {"x-group-id": "group", "x-group-size": "2", "x-rollout-end": "true", "x-rollout-id": str(number)}
            self.say("The same prompt:", [], headers, sampling_seed=number)


@contextmanager
def router(checkout: Path, worker: str, store: str, *more: str, tokenizer: Path | None = None) -> Iterator[str]:
    """Run the router of a checkout, and kill it in the end. Yields its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = [
        "--worker-urls",
        worker,
        "--tokenizer-path",
        str(tokenizer or shipped_tokenizer()),
        "--store",
        store,
        "--port",
        str(port),
        *more,
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen([sys.executable, "-m", "router", *flags], cwd=checkout, env=environment)
    try:
        while process.poll() is None and not _answers(url):
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        call(url, "/retrieve_from_text", {"text": "a"})
    except OSError:
        return False
    return True


def written(checkout: Path, store: str) -> bytes:
    """Return what was played and sampled, as JSON."""
    options = WorkerOptions(weight_version=FIRST_VERSION, token_delay=0)
    with EmbeddedWorker(None, options) as worker, router(checkout, worker.url, store) as url:
        play = Play(url)
        play.all()
    fields = ("input_ids", "output_ids", "logprobs", "versions")
    sampled = {one.rid: {name: getattr(one, name) for name in fields} for one in worker.log}
    return json.dumps({**play.known, "sampled": sampled}).encode()


def spooled(checkout: Path, folder: Path) -> bytes:
    """Return what was sampled before and while the store, a file in this folder, was locked, as JSON."""
    file = folder / "store.sqlite3"
    more = ("--store-spool", str(folder / "spool"))
    options = WorkerOptions(weight_version=FIRST_VERSION, token_delay=0)
    with EmbeddedWorker(None, options) as worker, router(checkout, worker.url, f"sqlite:{file}", *more) as url:
        play = Play(url)
        first = play.say(QUESTIONS[0], [], {})
        connection = apsw.Connection(str(file))
        connection.execute("BEGIN IMMEDIATE")
        texts = [first, play.say(first + QUESTIONS[1], [], {}), *(play.say(text, [], {}) for text in QUESTIONS)]
        time.sleep(1)
    connection.execute("ROLLBACK")
    _without_log(connection)
    sampled = [{"input_ids": one.input_ids, "output_ids": one.output_ids} for one in worker.log]
    return json.dumps({"texts": texts, "sampled": sampled}).encode()


def with_images(checkout: Path, store: str) -> bytes:
    """Return a session with two images and what was sampled in it, as JSON."""
    folder = shipped_image_tokenizer()
    with (
        EmbeddedWorker(folder, WorkerOptions(token_delay=0)) as worker,
        router(checkout, worker.url, store, tokenizer=folder) as url,
    ):
        name = call(url, "/sessions", {})[1]["session_id"]
        messages: list[dict[str, Any]] = []
        for seed in (1, 2):
            image = {"type": "image_url", "image_url": {"url": data_url(picture(40, 30, seed))}}
            messages.append({"role": "user", "content": [image]})
            body = {"messages": messages, "max_tokens": 6}
            reply = call(url, f"/sessions/{name}/v1/chat/completions", body)[1]
            messages.append(reply["choices"][0]["message"])
    last = worker.log[-1]
    found = {"session": name, "messages": messages, "ids": [*last.input_ids, *last.output_ids], "images": last.images}
    return json.dumps(found).encode()


def restore(keys: bytes, address: str) -> None:
    """Write keys into a Redis, given what `dump` returned."""
    pairs = json.loads(keys).items()
    answers = ask(address, *(("RESTORE", base64.b64decode(key), "0", base64.b64decode(value)) for key, value in pairs))
    assert set(answers) == {b"OK"}, answers


def dump(address: str) -> bytes:
    """Return the keys of a Redis that do not expire."""
    (keys,) = ask(address, ("KEYS", "*"))
    ages = ask(address, *(("TTL", key) for key in keys))
    kept = sorted(key for key, age in zip(keys, ages, strict=True) if age == -1)
    values = ask(address, *(("DUMP", key) for key in kept))
    encoded = ([base64.b64encode(one).decode() for one in pair] for pair in zip(kept, values, strict=True))
    return json.dumps(dict(encoded)).encode()


def ask(address: str, *commands: tuple[str | bytes, ...]) -> list[Any]:
    """Send commands to a Redis, and return its answers."""
    parts = urlsplit(address)
    answers, reader = [], hiredis.Reader()
    with socket.create_connection((parts.hostname, parts.port), 10) as connection:
        connection.sendall(b"".join(map(hiredis.pack_command, commands)))
        while len(answers) < len(commands):
            reader.feed(connection.recv(1 << 16))
            while (answer := reader.gets()) is not False:
                answers.append(answer)
    return answers


def main() -> None:
    checkout, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    if "--images" in sys.argv[3:]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "store.sqlite3")
            _keep(f"{name}.images.truth.json", with_images(checkout, f"sqlite:{file}"))
            _without_log(apsw.Connection(str(file)))
            _keep(f"{name}.images.sqlite", file.read_bytes())
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "store.sqlite3")
        _keep(f"{name}.sqlite.truth.json", written(checkout, f"sqlite:{file}"))
        _without_log(apsw.Connection(str(file)))
        _keep(f"{name}.sqlite.store", file.read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        _keep(f"{name}.spool.truth.json", spooled(checkout, Path(folder)))
        _keep(f"{name}.spool.sqlite", Path(folder, "store.sqlite3").read_bytes())
        (spool,) = Path(folder, "spool").rglob("*.spool*")
        _keep(f"{name}.spool", spool.read_bytes().rstrip(b"\0"))
    address = empty_redis()
    _keep(f"{name}.redis.truth.json", written(checkout, address))
    _keep(f"{name}.redis.store", dump(address))


def _without_log(connection: apsw.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _keep(name: str, content: bytes) -> None:
    (FOLDER / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    main()
