"""Requests that are wrong below HTTP: what a socket may bring instead of one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Callable

from tests.fuzz.exchange import Answer

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})(?: [ -~]*)?")
_LONG = b"b" * 9_000  # longer than a head may be
_LENGTHS = (
    *(
        b"0",
        b"1",
        b"-1",
        b"+5",
        b"0x10",
        b"5 5",
        b"",
        b"1e3",
        b"99999999",
        b"18446744073709551616",
        b"5, 5",
        b"5;a",
        b"\xb2",
    ),
    b"9" * 400,
)
_CODINGS = (
    *(
        b"chunked",
        b"gzip, chunked",
        b"chunked, chunked",
        b"identity",
        b"Chunked ",
        b"xchunked",
        b"",
        b"chunked\x0b",
        b"\tchunked",
    ),
)
_SIZES = (
    *(
        b"zz",
        b"-1",
        b"ffffffffffffffff",
        b"fffffffffffffffff",
        b"5 ",
        b"",
        b"0x5",
        b"1\r",
        b"5\n",
        b"\x00",
        b"5;a=" + _LONG,
    ),
)
_TRAILERS = (b"\r\n", b"a: b\r\n\r\n", b"", b"a: " + _LONG + b"\r\n\r\n", b"x", b"content-length: 5\r\n\r\n")
_METHODS = (b"get", b"", b"POST\x00", b"CONNECT", b"M-SEARCH", b"PO ST", b"A" * 3_000)
_TARGETS = (
    *(
        b"*",
        b"",
        b"generate",
        b"http://a/generate",
        b"http://127.0.0.1:1/v1/models",
        b"//",
        b"/\xff",
        b"/\xc3\xa9",
        b"/a b",
    ),
    *(b"/%", b"/#a", b"/?\xff", b"/a\x00b", b"?", b"a:1", b"/..//..", b"/\x7f", b"\\", b"/generate\t", b"/" + _LONG),
)
_VERSIONS = (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 ", b"http/1.1", b"", b"HTTP/1.01")
_LINES = (
    *(b"", b" ", b":", b"a", b": b", b"a :b", b" a: b", b"a\x00: b", b"a: b\x00", b"a: \x01", b"a: b\x0bc", b"\xff: b"),
    *(
        b"a: \xff",
        b"host: b",
        b"transfer-encoding: chunked",
        b"expect: 100-continue",
        b"upgrade: h2c",
        b"connection: upgrade",
    ),
    *(
        b"connection: close",
        b"content-length: 3",
        b"a: b\rc",
        b"a: b\r\n c",
        b"x-request-id: a\tb",
        b"a: " + _LONG,
        _LONG,
    ),
)
_BEGINNINGS = (
    *(
        b"\r\n",
        b"\r\n" * 5_000,
        b"\x00",
        b" ",
        b"\xef\xbb\xbf",
        b"SSH-2.0-a\r\n",
        b"GET /\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
    ),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nhost: a\r\n\r\n",
)


def spoilt(request: bytes, rng: random.Random) -> bytes:
    """A request, changed in one or two ways; nothing may be left of it after the first."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        request = rng.choice(_WAYS)(request, rng) if request else request
    return request


async def talk(port: int, request: bytes, *, patience: float, seconds: float) -> Answer:
    """Send bytes, wait a little for an answer, then say that there is no more, and wait for the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 1"):
                        pass
                    received += head
            with contextlib.suppress(OSError):
                writer.write_eof()
            async with asyncio.timeout(seconds):
                received += await reader.read()
    except asyncio.IncompleteReadError as error:
        received += error.partial
    except TimeoutError as error:
        return Answer(error=error, seconds=seconds)
    finally:
        writer.transport.abort()
    return read(bytes(received))


def read(received: bytes) -> Answer:
    """The first answer in what came; without a status if there is none."""
    answer = Answer()
    head, end, rest = received.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    matched = _STATUS.fullmatch(first)
    if not received:
        return answer
    if matched is None or not end:
        answer.faults.append(f"this is no head of an answer: {head[:200]!r}")
        return answer
    headers = [tuple(line.split(b": ", 1)) for line in lines]
    length = dict(headers).get(b"content-length")
    answer.take({"type": "http.response.start", "status": int(matched[1]), "headers": headers})
    answer.take({"type": "http.response.body", "body": rest if length is None else rest[: int(length)]})
    return answer


def _parted(request: bytes) -> tuple[list[bytes], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), body


def _joined(lines: list[bytes], body: bytes) -> bytes:
    return b"\r\n".join((*lines, b"", body))


def _framing(request: bytes, rng: random.Random) -> bytes:
    """Another length than the body has, or two of them, or none."""
    lines, body = _parted(request)
    kept = [
        line for line in lines if not line.startswith((b"content-length", b"transfer-encoding")) or rng.random() < 0.3
    ]
    if rng.random() < 0.8:
        kept.append(
            b"content-length: " + rng.choice((*_LENGTHS, b"%d" % (len(body) + rng.choice((-2, -1, 0, 1, 100)))))
        )
    if rng.random() < 0.3:
        kept.append(b"transfer-encoding: " + rng.choice(_CODINGS))
    return _joined(kept, body)


def _chunks(request: bytes, rng: random.Random) -> bytes:
    """A chunked body that is not chunked as it should be."""
    lines, body = _parted(request)
    kept = [line for line in lines if not line.startswith((b"content-length", b"transfer-encoding"))]
    size = rng.choice((*_SIZES, b"%x" % (len(body) + rng.choice((0, 0, 1, -1)))))
    trailers = rng.choice(_TRAILERS)
    return _joined([*kept, b"transfer-encoding: chunked"], size + b"\r\n" + body + b"\r\n0\r\n" + trailers)


def _first_line(request: bytes, rng: random.Random) -> bytes:
    lines, body = _parted(request)
    words = [*lines[0].split(b" "), b"", b""]
    at = rng.randrange(3)
    words[at] = rng.choice((_METHODS, _TARGETS, _VERSIONS)[at])
    return _joined([b" ".join(words[:3]), *lines[1:]], body)


def _a_line(request: bytes, rng: random.Random) -> bytes:
    lines, body = _parted(request)
    lines.insert(rng.randint(1, len(lines)), rng.choice(_LINES))
    return _joined(lines * rng.choice((1, 1, 1, 1, 40)) if rng.random() < 0.1 else lines, body)


def _line_ends(request: bytes, rng: random.Random) -> bytes:
    return request.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\n\r", b"\r\r\n", b"\r\n\r\n")), rng.choice((1, 2, -1)))


def _bytes(request: bytes, rng: random.Random) -> bytes:
    changed = bytearray(request)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut(request: bytes, rng: random.Random) -> bytes:
    return request[: rng.randrange(len(request))]


def _beginning(request: bytes, rng: random.Random) -> bytes:
    return rng.choice((*_BEGINNINGS, rng.randbytes(rng.choice((1, 50, 9_000))))) + request


def _twice(request: bytes, rng: random.Random) -> bytes:
    return request * rng.choice((2, 3)) + rng.choice((b"", b"GET", b"\r\n\r\n"))


_WAYS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(
        _framing,
        _framing,
        _chunks,
        _first_line,
        _first_line,
        _a_line,
        _a_line,
        _line_ends,
        _bytes,
        _cut,
        _beginning,
        _twice,
    ),
)
