"""How vLLM refuses a request."""

from __future__ import annotations


class Rejected(Exception):
    """vLLM refuses the request, in its words."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        kind = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}.get(status, "Error")
        self.status = status
        self.error = {"error": {"message": message, "type": kind, "param": param, "code": status}}
