"""A router that remembers what a test makes up: the page's own files, and answers of any size, with any text in any field."""

from __future__ import annotations

import contextlib
import json
import mimetypes
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

STATIC = Path(__file__).parents[2] / "middleware_hub" / "inspector" / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)

Answers = Callable[[str, list[str], dict[str, str]], Any]
"""Maps a method, the parts of a path below the API, and its query to an answer; None is 404."""


@contextlib.contextmanager
def serving(answers: Answers, key: str | None = None, files: Mapping[str, bytes] | None = None) -> Iterator[str]:
    """Serve the page, these answers, and files of images by their digests; yield the URL. With a key, both need it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path.startswith("/inspect/api"):
                self._answer("GET", url.path, dict(parse_qsl(url.query)))
                return
            if url.path.startswith("/media/"):
                found = None if self._refused() else (files or {}).get(url.path.removeprefix("/media/"))
                if found is not None:
                    self._send(200, found, "image/png")
                return
            relative = "index.html" if url.path == "/inspect" else url.path.removeprefix("/inspect/assets/")
            path = STATIC / relative
            if path.is_file():
                self._send(200, path.read_bytes(), mimetypes.guess_type(path.name)[0] or "text/plain")
            else:
                self._send(404, b"{}", "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer("POST", urlsplit(self.path).path, body)

        def _answer(self, method: str, path: str, fields: dict[str, str]) -> None:
            if self._refused():
                return
            parts = [unquote(part) for part in path.removeprefix("/inspect/api/").split("/")]
            found = answers(method, parts, fields)
            if found is None:
                self._send(404, json.dumps({"error": {"message": "no such conversation"}}).encode(), "application/json")
            elif found == 204:
                self._send(204, b"", "application/json")
            else:
                self._send(200, json.dumps(found).encode(), "application/json")

        def _refused(self) -> bool:
            if key is None or self.headers.get("authorization") == f"Bearer {key}":
                return False
            self._send(401, json.dumps({"error": {"message": "a key is required"}}).encode(), "application/json")
            return True

        def _send(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-security-policy", POLICY)
            self.send_header("x-content-type-options", "nosniff")
            if status != 204:
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the page has gone on
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


WORDS = [
    "Thought",
    ":",
    " I",
    " have",
    " to",
    " find",
    " two",
    " num",
    "bers",
    ".",
    " First",
    " wr",
    "ite",
    "\n",
    " the",
    " river",
]
SIGNS = {"emoji": "\U0001f30a", "arabic": " مرحبا", "chinese": "汉江", "tab": "\t", "wide": "\u200b"}


def logprob(index: int) -> float:
    return -((index * 7919) % 97) / 24


class MadeUp:
    """One conversation of `total` tokens, made up from the number of each token; `mark` is put into every field of text."""

    def __init__(self, total: int, *, turn: int = 100, mark: str = "", reasons: tuple[str, ...] = ()) -> None:
        self.total, self.turn, self.mark, self.reasons = total, turn, mark, list(reasons)
        self.id = f"text:{mark}one"
        self.branch = f"{mark}reply-9"
        self.versions = [f"{mark}3", f"{mark}4", f"{mark}5"]

    def text(self, index: int) -> str:
        if index % 50 == 7 and self.mark:
            return self.mark
        if index % 41 == 5:
            return list(SIGNS.values())[index // 41 % len(SIGNS)]
        return WORDS[index % len(WORDS)]

    def sampled(self, index: int) -> bool:
        return index // self.turn % 2 == 1

    def drift(self, start: int, end: int) -> list[dict[str, Any]]:
        found = []
        for at in range(start - start % len(WORDS) + 11, end, len(WORDS)):
            if self.sampled(at) and self.sampled(at + 1) and at + 1 < self.total and at % 3 == 0 and at >= start - 1:
                texts = [self.text(at), self.text(at + 1)]
                joined = "".join(texts)
                found.append(
                    {"start": at, "end": at + 2, "text": joined, "sampled": [at % 90, (at + 1) % 90]}
                    | {"encoded": [77], "sampled_texts": texts, "encoded_texts": [joined]}
                )
        return found

    def turns(self) -> list[dict[str, Any]]:
        found = []
        for number, start in enumerate(range(0, self.total, self.turn)):
            end = min(start + self.turn, self.total)
            sampled = number % 2 == 1
            drifted = sum(2 for span in self.drift(start, end) if start <= span["start"] < end) if sampled else 0
            found.append(
                {"request_id": f"{self.mark}reply-{number}", "start": start, "end": end, "sampled": sampled}
                | {
                    "version": self.versions[number % 3] if sampled else None,
                    "role": "assistant" if sampled else "user",
                }
                | {"finish": ("length" if number == 5 else "stop") if sampled else None, "drifted": drifted}
                | {"reasons": self.reasons if number == 1 else []}
                | {"sampled_tokens": end - start if sampled else 0, "logprob": -1.5 - number / 100 if sampled else None}
            )
        return found

    def head(self) -> dict[str, Any]:
        turns = self.turns()
        sampled = sum(turn["sampled_tokens"] for turn in turns)
        drifted = sum(turn["drifted"] for turn in turns)
        return {
            "id": self.branch,
            "total": self.total,
            "chars": self.total * 4,
            "exact": not self.reasons,
            "reasons": self.reasons,
            "versions": self.versions,
            "turns": turns,
            "text_preview": self.mark,
            "logprobs": {"p01": -4.0, "p50": -2.0, "p99": 0.0, "min": -4.0, "max": 0.0, "count": sampled},
            "drift": {
                "sampled_tokens": sampled,
                "drifted_tokens": drifted,
                "share": drifted / max(1, sampled),
                "spans": drifted // 2,
            },
        }

    def tokens(self, start: int, end: int) -> dict[str, Any]:
        end = min(end, self.total)
        window = range(start, end)
        turn = self.turn
        return {
            "start": start,
            "end": end,
            "total": self.total,
            "ids": [at % 90 for at in window],
            "texts": [self.text(at) for at in window],
            "bytes": {str(at): "f09f8c" for at in window if at % 211 == 3},
            "special": [at for at in window if at % 499 == 0],
            "mask": [int(self.sampled(at)) for at in window],
            "logprobs": [logprob(at) if self.sampled(at) else None for at in window],
            "versions": [at // turn % 3 if self.sampled(at) else -1 for at in window],
            "turns": [at // turn for at in window],
            "drift": self.drift(start, end),
        }

    def summary(self) -> dict[str, Any]:
        head = self.head()
        return {
            "id": self.id,
            "kind": "text",
            "namespace": self.mark or None,
            "adapter": self.mark or None,
            "title": f"{self.mark}Question: What is 6 * 7?",
            "turns": len(head["turns"]),
            "tokens": self.total,
            "sampled": head["drift"]["sampled_tokens"],
            "branches": 1,
            "versions": self.versions,
            "reward": 0.5,
            "group": f"{self.mark}group" if self.mark else None,
            "exact": head["exact"],
            "reasons": self.reasons,
            "created": 1_790_000_000,
            "updated": 1_790_000_100,
            "model": self.mark or None,
        }

    def whole(self) -> dict[str, Any]:
        summary = self.summary()
        node = {
            "parent": None,
            "role": "assistant",
            "tokens": self.total,
            "sampled": 1,
            "version": "3",
            "finish": "stop",
        }
        branch = {
            key: summary[key]
            for key in ("turns", "tokens", "sampled", "versions", "reward", "exact", "reasons", "updated")
        }
        return summary | {
            "tree": [
                node
                | {"id": "n", "request_id": self.branch, "preview": f"{self.mark}I have to", "branch_of": [self.branch]}
            ],
            "branches_list": [branch | {"id": self.branch, "label": f"{self.mark}label " + "of many words " * 9}],
        }

    def run(self) -> dict[str, Any]:
        head = self.head()
        mark = self.mark
        return {
            "computed_at": 1_790_000_000,
            "done": True,
            "progress": 1,
            "conversations": 1,
            "tokens": self.total,
            "sampled_tokens": head["drift"]["sampled_tokens"],
            "drift": head["drift"]
            | {
                "by_kind": [{"kind": f"{mark}word", "tokens": 90, "drifted": 9}],
                "pairs": [{"sampled": [f"{mark} wr", "ite"], "encoded": [f"{mark} write"], "count": 9}],
            },
            "inexact": [{"reason": reason, "conversations": 1} for reason in self.reasons],
            "staleness": [{"versions_behind": 0, "tokens": 70}, {"versions_behind": 1, "tokens": 30}],
            "reuse": {"prompt_tokens": 100, "reused_tokens": 81},
            "logprobs": {
                "edges": [-4, -3, -2, -1, 0],
                "counts": [1, 5, 9, 40],
                "by_version": [{"version": f"{mark}3", "mean": -1.2, "p05": -3.1, "p50": -0.9, "p95": -0.1}],
            },
            "sampled_over_time": [
                {"time": 1_790_000_000 + 60 * n, "version": self.versions[n // 3], "tokens": 40 + 9 * n}
                for n in range(9)
            ],
        }

    def explain(self) -> dict[str, Any]:
        mark = self.mark
        return {
            "message": f"{mark} at character 37",
            "matched_chars": 37,
            "text_length": 61,
            "replies_matched": 1,
            "text": {"before": f"{mark}?\nThought:", "after": f"{mark}There"},
            "recorded": {"before": mark, "after": f" {mark}"},
            "other_recorded": [f"{mark} other"],
            "tokens": 20,
            "exact": False,
            "reasons": self.reasons or ["retokenized"],
            "advice": [{"reason": f"{mark}retokenized", "what": f"{mark}encoded", "do": f"{mark}keep it"}],
        }

    def compare(self) -> dict[str, Any]:
        rest = self.total - 12
        runs = [{"op": "equal", "a": [0, 10], "b": [0, 10]}, {"op": "replace", "a": [10, 12], "b": [10, 11]}]
        runs.append({"op": "equal", "a": [12, 12 + rest], "b": [11, 11 + rest]})
        return {
            "a": self.head(),
            "b": self.head(),
            "first_difference": {"a": 10, "b": 10},
            "runs": runs,
            "truncated": False,
        }

    def answers(self, method: str, parts: list[str], fields: dict[str, str]) -> Any:
        """Answer as the API does."""
        match [method, *parts]:
            case ["GET", "conversations"] if fields.get("changed_since") == "1":
                return 204
            case ["GET", "conversations"]:
                fits = not {"namespace", "reason"} & fields.keys()
                sums = {"conversations": 1, "sessions": 0, "tokens": self.total}
                return {
                    "conversations": [self.summary()] if fits else [],
                    "next": None,
                    "remembered": sums,
                    "change": 1,
                }
            case ["GET", "conversations", self.id]:
                return self.whole()
            case ["GET", "conversations", self.id, "branches", self.branch]:
                return self.head()
            case ["GET", "conversations", self.id, "branches", self.branch, "tokens"]:
                return self.tokens(int(fields["start"]), int(fields["end"]))
            case ["GET", "conversations", self.id, "branches", self.branch, "find"]:
                return {
                    "matches": [{"start": at, "end": at + 1} for at in range(3, self.total, 997)][:100],
                    "more": False,
                }
            case ["GET", "compare"]:
                return self.compare()
            case ["POST", "explain"]:
                return self.explain()
            case ["GET", "run"]:
                return self.run()
        return None
