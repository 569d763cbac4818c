"""The log: one line per message on stderr, as text or JSON, with the id of its request."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from datetime import UTC, datetime

import msgspec

from router.config.server import LogFormat
from router.errors import RouterError
from router.http.request_state import REQUEST_ID
from router.http.upstream import UpstreamFailure


def configure_logging(level: str, log_format: LogFormat = "text", process: int | None = None) -> None:
    """Send the log to stderr. A root logger that has handlers keeps them. `process` is the number of one of several."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if log_format == "json":
        logging.captureWarnings(True)
    server_log = logging.getLogger("uvicorn.error")
    server_log.addFilter(_in_our_words)
    if level != "debug":
        server_log.setLevel("WARNING")


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that end a line, or command a terminal. Paths and workers' replies may hold it."""


class TextFormatter(logging.Formatter):
    """`time level logger [request id]: message` in one line, and a traceback below it if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = REQUEST_ID.get()
        about = "" if request_id is None else f" [{request_id}]"
        message = _CONTROL.sub(_escaped, record.message)
        return f"{super().formatMessage(record)}{about}: {message}"


class JsonFormatter(logging.Formatter):
    """One line with a JSON object: `time`, `level`, `logger`, `message`, and maybe `process`, `request_id`, `exception`."""

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process is not None:
            entry["process"] = self._process
        request_id = REQUEST_ID.get()
        if request_id is not None:
            entry["request_id"] = request_id
        parts = [self.formatException(record.exc_info)] if record.exc_info else []
        parts += [self.formatStack(record.stack_info)] if record.stack_info else []
        if parts:
            entry["exception"] = "\n".join(parts)
        try:
            return msgspec.json.encode(entry).decode()
        except UnicodeEncodeError:  # lone surrogates, from a file name or a client's JSON
            return msgspec.json.encode({key: _encodable(value) for key, value in entry.items()}).decode()


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()


def _encodable(value: str | int) -> str | int:
    return value if isinstance(value, int) else value.encode("utf-8", "backslashreplace").decode()


def _in_our_words(record: logging.LogRecord) -> bool:
    """Log a reply that was broken off on purpose in one line: its traceback is uvicorn's, and says nothing.

    It leaves out that the application could not start, or was stopped before it had started: the server logs that itself.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RouterError | UpstreamFailure):
        record.msg, record.args, record.exc_info = "reply broken off: %s", (error,), None
    return record.msg != "Application startup failed. Exiting." and not isinstance(error, asyncio.CancelledError)
