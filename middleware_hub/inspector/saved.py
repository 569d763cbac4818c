"""A conversation, or a report, as one HTML file that needs nothing else: the inspector's page with its data in it.

Modules of a file on a disk cannot import each other, so each becomes a `data:` URL that an import map names. Only these scripts
may run, and nothing may be fetched: the page says so itself, in its policy.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

STATIC = Path(__file__).parent / "static"
START = "main.js"
STYLES = ("style/base.css", "style/views.css", "style/tokens.css")
_IMPORT = re.compile(r'^(import .*? from |import )"(\.[^"]+)";$', re.MULTILINE)


def saved_page(data: Mapping[str, object]) -> bytes:
    """Return the page.

    Args:
        data: `saved` (1), `at` (seconds since 1970), and `answers`, which maps paths of the API to their answers: a
            conversation, its branches, and the `tokens` of each branch from its first to its last; or `/run`.
    """
    # In a script of a page, "<" could begin its end, or a comment. JSON may write it as an escape wherever it may stand.
    content = msgspec.json.encode(data).replace(b"<", b"\\u003c")
    before, behind = _frame()
    return before + content + behind


@lru_cache(maxsize=1)
def _frame() -> tuple[bytes, bytes]:
    """Return the parts of the page before and after the data."""
    names = {path.relative_to(STATIC).as_posix(): path.read_text() for path in sorted(STATIC.rglob("*.js"))}
    imports = {_named(name): _data_url(_resolved(name, source)) for name, source in names.items()}
    table = msgspec.json.encode({"imports": imports}).decode().replace("<", "\\u003c")
    start = f'import "{_named(START)}";'
    style = "\n".join((STATIC / name).read_text() for name in STYLES)
    policy = (
        f"default-src 'none'; script-src data: {_hash(table)} {_hash(start)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    before = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Inspector</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<script type="importmap">{table}</script>
</head>
<body>
<script type="application/json" id="data">"""
    return before.encode(), f'</script>\n<script type="module">{start}</script>\n</body>\n</html>\n'.encode()


def _named(name: str) -> str:
    return f"inspector/{name}"


def _resolved(name: str, source: str) -> str:
    """Return the source of a module with the names of the import map in its imports."""

    def full(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
        return f'{match[1]}"{_named(path)}";'

    return _IMPORT.sub(full, source)


def _data_url(source: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
