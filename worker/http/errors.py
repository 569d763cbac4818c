"""How a request can fail before it is a generation."""

from __future__ import annotations

from typing import Any, Literal

Shape = Literal["message", "error", "object"]


class Refused(Exception):
    """SGLang refuses the request with a 400, in one of three shapes.

    Its tokenizer manager answers with `message`, its request contract with `error`, and FastAPI with `object`.
    """

    def __init__(self, message: str, shape: Shape = "message") -> None:
        super().__init__(message)
        self.message = message
        self.shape = shape

    def body(self) -> dict[str, Any]:
        """Return the JSON of the 400."""
        if self.shape == "object":
            return {"object": "error", "message": self.message, "type": "Bad Request", "param": None, "code": 400}
        return {"error": self.message if self.shape == "error" else {"message": self.message}}


class OutOfRange(Refused):
    """The request is outside of SGLang's valid range: a router must not send it. It is noted, and refused with a 400."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "error")
