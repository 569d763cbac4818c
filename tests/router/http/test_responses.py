"""An error has the form that the clients of its path read."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from starlette.types import Message

from router.config import ServerConfig
from router.errors import ForbiddenError, NoWorkerError
from router.http.responses import error_body, send_error
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving

ANTHROPICS = ["/v1/messages", "/v1/messages/count_tokens", "/sessions/s/v1/messages", "/sessions/s/v1/v1/messages"]
OTHERS = ["/generate", "/v1/chat/completions", "/sessions/s/v1/chat/completions", "/sessions/messages", ""]


@pytest.mark.parametrize("path", ANTHROPICS)
def test_anthropics_clients_get_theirs(path: str) -> None:
    body = msgspec.json.decode(error_body(ForbiddenError("no"), path))
    assert body == {"type": "error", "error": {"type": "permission_error", "message": "no", "code": 403}}
    body = msgspec.json.decode(error_body(NoWorkerError("none", detail=1), path))
    assert body["error"] == {"type": "no_worker", "message": "none", "code": 503, "detail": 1}


@pytest.mark.parametrize(
    "path",
    ["/v1beta/models/m:generateContent", "/sessions/s/v1/models/m:countTokens", "/v1beta/files", "/v1alpha/models"],
)
def test_googles_clients_get_theirs(path: str) -> None:
    error = NoWorkerError("none", headers=(("retry-after", "7"),), code="a_word", param="x")
    assert msgspec.json.decode(error_body(error, path)) == {
        "error": {
            "code": 503,
            "message": "none",
            "status": "UNAVAILABLE",
            "details": [
                {
                    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                    "reason": "a_word",
                    "domain": "tito-router",
                    "metadata": {"param": "x"},
                },
                {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7s"},
            ],
        }
    }


@pytest.mark.parametrize("path", OTHERS)
def test_all_others_get_the_usual_one(path: str) -> None:
    assert msgspec.json.decode(error_body(ForbiddenError("no"), path)) == ForbiddenError("no").body()


@pytest.mark.parametrize("path", ANTHROPICS)
def test_a_key_that_is_none(path: str) -> None:
    async def main() -> None:
        server = ServerConfig(api_keys=("a:one",))
        async with (
            serving(EchoWorker()) as url,
            running([url], server=server) as router,
            router.client.post(path, data=b"{}", headers={"x-api-key": "wrong"}) as reply,
        ):
            assert reply.status == 401
            body = await reply.json()
            assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
            assert "www-authenticate" in reply.headers

    asyncio.run(main())


def test_errors_are_sent_with_their_headers() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(send_error(send, NoWorkerError("none", headers=(("Retry-After", "3"),), detail=1)))
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"3") in sent[0]["headers"]
    assert (b"content-length", b"%d" % len(sent[1]["body"])) in sent[0]["headers"]
    assert msgspec.json.decode(sent[1]["body"]) == {
        "error": {"message": "none", "type": "no_worker", "code": 503, "detail": 1}
    }
