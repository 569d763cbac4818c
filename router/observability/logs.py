"""The log: one line to stderr for each thing that is said, as text or as JSON, with the request it is about."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from router.config import LogFormat
from router.errors import RouterError
from router.http.upstream import UpstreamFailure
from router.observability.requests import REQUEST_ID


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Everything to stderr. Does nothing to a process that logs already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if log_format == "json":
        logging.captureWarnings(True)
    server_log = logging.getLogger("uvicorn.error")
    server_log.addFilter(_without_known_tracebacks)
    if level != "debug":
        server_log.setLevel("WARNING")


class TextFormatter(logging.Formatter):
    """`time level logger [request id]: message`, and a traceback below it if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without the traceback."""
        request_id = REQUEST_ID.get()
        about = "" if request_id is None else f" [{request_id}]"
        return f"{super().formatMessage(record)}{about}: {record.message}"


class JsonFormatter(logging.Formatter):
    """One JSON object, whatever line breaks are in it: `time`, `level`, `logger`, `message`, `request_id`, `exception`.

    The last two only where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The whole line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id is not None:
            entry["request_id"] = request_id
        told = [self.formatException(record.exc_info)] if record.exc_info else []
        told += [self.formatStack(record.stack_info)] if record.stack_info else []
        if told:
            entry["exception"] = "\n".join(told)
        try:
            return msgspec.json.encode(entry).decode()
        except UnicodeEncodeError:  # halves of surrogate pairs, out of a file's name or a client's JSON
            return msgspec.json.encode({key: _encodable(value) for key, value in entry.items()}).decode()


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _without_known_tracebacks(record: logging.LogRecord) -> bool:
    """A reply broken off on purpose is one line: its traceback would tell of uvicorn, a hundred times a dead worker."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RouterError | UpstreamFailure):
        record.msg, record.args, record.exc_info = "reply broken off: %s", (error,), None
    return True
