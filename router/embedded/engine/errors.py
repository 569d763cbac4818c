"""How a request can go wrong before it is a generation."""

from __future__ import annotations

from typing import Any, Literal

Shape = Literal["message", "error", "object"]


class Refused(Exception):
    """A request that is wrong, in one of SGLang's shapes.

    `message` is what its tokenizer manager raises, `error` what its request contract says, `object` what FastAPI finds.
    """

    def __init__(self, message: str, shape: Shape = "message") -> None:
        super().__init__(message)
        self.message = message
        self.shape = shape

    def body(self) -> dict[str, Any]:
        """The JSON of the 400."""
        if self.shape == "object":
            return {"object": "error", "message": self.message, "type": "Bad Request", "param": None, "code": 400}
        return {"error": self.message if self.shape == "error" else {"message": self.message}}


class Broken(Exception):
    """A request at which SGLang's front end fails: HTTP 500 as plain text, and the connection is closed."""


class Deadly(Exception):
    """A request that ends a worker."""
