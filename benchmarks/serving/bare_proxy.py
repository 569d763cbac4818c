"""A proxy of uvicorn, Starlette and aiohttp that does nothing else: the minimal cost of this stack.

`python -m benchmarks.serving.bare_proxy --port 0 --worker-url URL [--json]`. With `--json` it parses and prints both bodies,
as a naive middleware that changes them would. Streams it passes on as they come.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

HEADERS = {"content-type": "application/json"}


def create_app(worker_url: str, *, parses: bool) -> Starlette:
    session: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        nonlocal session
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield

    async def stream(body: bytes) -> AsyncIterator[bytes]:
        async with session.post(f"{worker_url}/generate", data=body, headers=HEADERS) as response:
            async for chunk in response.content.iter_any():
                yield chunk

    async def generate(request: Request) -> Response:
        body = await request.body()
        if b'"stream":true' in body:
            return StreamingResponse(stream(body), media_type="text/event-stream")
        if parses:
            body = msgspec.json.encode(msgspec.json.decode(body))
        async with session.post(f"{worker_url}/generate", data=body, headers=HEADERS) as response:
            content = await response.read()
        if parses:
            content = msgspec.json.encode(msgspec.json.decode(content))
        return Response(content, response.status, media_type="application/json")

    async def health(_: Request) -> Response:
        return Response()

    routes = [Route("/generate", generate, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-url", required=True)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(sys.argv[1:])
    app = create_app(args.worker_url, parses=args.json)
    uvicorn.run(app, port=args.port, loop="uvloop", http="httptools", log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
