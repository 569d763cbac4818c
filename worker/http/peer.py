"""A question of one worker to another one."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec


class PeerError(Exception):
    """The other worker did not answer, or did not do it; the message says why."""


async def ask(host: str, port: int, path: str, body: dict[str, Any], seconds: float) -> Any:
    """Return the JSON that a worker answers to a POST, for which it may take so many seconds. Raises PeerError."""
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(seconds):
            status, content = await _exchange(host, port, path, msgspec.json.encode(body))
    except TimeoutError:
        raise PeerError(f"{where} has not answered within {seconds:g} s") from None
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise PeerError(f"{where} cannot be asked: {error}") from None
    if status != 200:
        raise PeerError(f"{where} answers {status}: {content.decode('utf-8', 'replace')}")
    return msgspec.json.decode(content)


async def _exchange(host: str, port: int, path: str, body: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        return int(lines[0].split()[1]), await reader.read()  # it has no chunks: workers know their lengths
    finally:
        writer.close()
