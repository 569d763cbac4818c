"""What may stand where something else should: values of JSON, what only looks like one, and headers of all sorts."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

Json = Any

NUMBERS: list[Json] = [
    *(0, 1, -1, 2, -2, 3, 16, 0.5, -0.5, 1.0, -0.0, 1.5),
    *(65_537, 151_643, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 1e308, -1e308, 5e-324),
    *map(
        Raw, (b"1e309", b"-1e309", b"1e-400", b"1" + b"0" * 30, b"1" + b"0" * 400, b"0." + b"3" * 400, b"1E+2", b"-0")
    ),
]
"""None of them lies between a hundred and what is refused as `n`: that would only be much work for a worker."""

STRINGS: list[Json] = [
    *("", " ", "\n", "\t \n", "a", "0", "-1", "1e9", "null", "true", "[]", "{}", "none", "default", "abort", "x" * 300),
    *(
        "\x00",
        "\x7f",
        "a\x00b",
        "\ufeff",
        "\ufffd",
        "\u2028",
        "\u202e",
        "e\u0301",
        "é",
        "ﬃ",
        "你好",
        "👩\u200d💻",
        "🇩🇪",
    ),
    *("<|im_end|>", "<|im_start|>user\n", "<|endoftext|>", "<think>", "</s>", "<|", "\\", '"', "'", "%00", "%s", "{0}"),
    *("../../etc/passwd", "http://", "r1", "r1_0", "(", "[[a]", "a{1,65536}", "(?P<n>", "\\", "*", "(a|b)*c"),
]

LONG_STRINGS: list[Json] = ["a" * 20_000, "ab " * 6_000, "é" * 9_000, "\n" * 10_000, "<|im_end|>" * 2_000, "🤷" * 4_000]

RAW_STRINGS: list[Json] = list(
    map(
        Raw,
        (
            *(
                rb'"\ud800"',
                rb'"\udc00\ud800"',
                rb'"a\ud83dz"',
                rb'"\ud83d\ude00"',
                rb'"\u0000"',
                rb'"\u12"',
                rb'"\x41"',
            ),
            *(b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xf5\x80\x80\x80"', b'"\x80abc"', b'"a\nb"', b'"\x00"'),
        ),
    )
)

CONTAINERS: list[Json] = [
    *([], {}, [[]], [{}], [None], [[], []], [[[]]], {"": ""}, {"a": None}, {"a": {"a": {"a": []}}}),
    *(
        [1],
        [-1],
        [1, 2],
        [[1], [2]],
        [[1], 2],
        [1.5],
        ["1"],
        [True],
        [None, 1],
        ["a", ""],
        [["a"]],
        [{"n": 2}],
        {"0": 1},
    ),
]

NOT_JSON: list[Json] = list(
    map(
        Raw,
        (
            *(
                b"NaN",
                b"Infinity",
                b"-Infinity",
                b"nan",
                b"undefined",
                b"None",
                b"True",
                b"+1",
                b"01",
                b"1.",
                b".5",
                b"1e",
            ),
            *(b"-", b"0x10", b"'a'", b'"a', b"[1,]", b"[1", b"{", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{a:1}", b"/**/1"),
            *(b"1 2", b"", b","),
        ),
    )
)

DEEP: list[Json] = list(
    map(
        Raw,
        (
            *(b"[" * depth + b"]" * depth for depth in (100, 900, 1_100, 100_000)),
            *(b'{"a":' * depth + b"1" + b"}" * depth for depth in (100, 1_100, 20_000)),
            *(b"[" * 100_000, b'{"a":' * 20_000, b"[{" * 30_000, b"[" * 500 + b"1" + b"]" * 500),
        ),
    )
)

ATOMS: list[tuple[int, list[Json]]] = [
    (24, [None, True, False]),
    (26, NUMBERS),
    (22, STRINGS),
    (2, LONG_STRINGS),
    (8, RAW_STRINGS),
    (16, CONTAINERS),
    (7, NOT_JSON),
    (1, DEEP),
]
"""With how often each kind is taken."""

_LONG = b"x" * 5_000
_ODD = (
    b"",
    b" ",
    b"a",
    b"a b",
    b"\xff",
    b"\xc3\xa9",
    b"'\"",
    b",",
    b",,",
    b"a,b",
    b"\t",
    b"%00",
    b"x" * 200,
    _LONG,
    b"null",
)

HEADERS: dict[bytes, tuple[bytes, ...]] = {
    b"x-abort-policy": (b"retry", b"return", b"RETRY", b"retry, return", b"none", *_ODD),
    b"x-radix-namespace": (b"fuzz", b"other", *_ODD),
    b"x-radix-parent": (b"none", b"r1", b"None", *_ODD),
    b"x-request-id": (b"one", b"a" * 128, b"a" * 129, *_ODD),
    b"x-tenant": (b"blue", b"red", b"Blue", *_ODD),
    b"x-smg-routing-key": (b"key", *_ODD),
    b"x-smg-target-worker": (b"0", b"http://127.0.0.1:1", *_ODD),
    b"x-session-id": (b"session", *_ODD),
    b"x-group-id": (b"g", b"g,h", b"g, g", b"a" * 129, *_ODD),
    b"x-group-size": (b"1", b"2", b"0", b"-1", b"65537", b"1.0", *_ODD),
    b"x-rollout-id": (b"o", b"o,p", *_ODD),
    b"x-rollout-end": (b"true", b"false", b"1", b"TRUE", *_ODD),
    b"content-encoding": (b"gzip", b"identity", b"br", b"gzip, gzip", b"IDENTITY", *_ODD),
    b"content-type": (
        *(
            b"text/plain",
            b"application/json; charset=utf-16",
            b"multipart/form-data; boundary=x",
            b"application/*",
            *_ODD,
        ),
    ),
    b"authorization": (
        *(b"Bearer blue-key", b"Bearer red-key", b"Bearer admin-key", b"Bearer", b"Basic YTpi", b"bearer  x", *_ODD),
    ),
    b"traceparent": (
        b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00",
        b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",
        *_ODD,
    ),
    b"tracestate": (b"a=b", *_ODD),
    b"connection": (b"close", b"keep-alive", b"content-type, x-radix-namespace", b"upgrade", *_ODD),
    b"upgrade": (b"websocket", b"h2c", *_ODD),
    b"expect": (b"100-continue", *_ODD),
    b"te": (b"trailers", *_ODD),
    b"trailer": (b"x-radix-parent", *_ODD),
    b"range": (b"bytes=0-1", *_ODD),
    b"accept": (b"text/event-stream", b"*/*", *_ODD),
    b"accept-encoding": (b"gzip", b"*;q=0", *_ODD),
    b"cookie": (b"a=b; c", *_ODD),
    b"origin": (b"null", b"http://a", *_ODD),
    b"host": (b"127.0.0.1:30000", b"a:b:c", *_ODD),
    b"forwarded": (b"for=1.2.3.4", *_ODD),
    b"x-tito-router-instance": (b"0" * 32, *_ODD),
    b"x-radix-recorded": (b"exact", *_ODD),
    b"x-router-worker": (b"http://127.0.0.1:1", *_ODD),
}
"""Values that a server lets through; which ones it does not is for its own test."""

QUERIES = (
    *(
        b"",
        b"a",
        b"a=b",
        b"url",
        b"url=",
        b"url=&url=",
        b"url=x",
        b"url=%00",
        b"url=%ff",
        b"url=%",
        b"&&&=",
        b"=",
        b"?",
        b"+",
    ),
    *(b"url=http%3A%2F%2F", b"url=http://[::1", b"url=http://a b", b"url=ftp://a", b"url=http://127.0.0.1:99999"),
    *(b"url=http://127.0.0.1:-1", b"url=http://user:p@127.0.0.1", b"worker_url=http://", b"stream=true", b"timeout=x"),
    *(b"abort_all=1", b"a=" + b"b" * 5_000),
)

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND")
