"""The code blocks of a page of documentation, with the directives in its comments.

<!-- not run: it needs a GPU -->      the next block is not run, and why
<!-- varies: \\d+ ms -->               in the next block, an output, text that matches this may differ
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("bash", "sh", "python")
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])

_BLOCK = re.compile(
    r"(?P<comments>(?:^<!--(?:(?!-->).)*-->\n+)*)^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_COMMENT = re.compile(r"<!--\s*(not run|varies):\s*(.*?)\s*-->", re.DOTALL)
_SECTION = re.compile(r"^## (?=.+$)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        place: page and line, in the form that editors accept.
        language: the word behind the fence; `text` is the output of the last command, and no word is a drawing.
        directly_behind_a_command: only comments stand between the last command and this block.
        not_run: why the block is not run; None if it is run.
        varies: a pattern for text that may differ in an output.
    """

    place: str
    language: str
    text: str
    directly_behind_a_command: bool
    not_run: str | None
    varies: str | None


@dataclass(frozen=True)
class Piece:
    """A page, or one section of a page whose sections are independent."""

    name: str
    blocks: tuple[Block, ...]


def pieces() -> list[Piece]:
    """Return every piece of the documentation that has blocks."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        text = page.read_text(encoding="utf-8")
        for title, begin, end in _sections(text) if name == "docs/trainers.md" else [("", 0, len(text))]:
            blocks = tuple(_blocks(name, text, begin, end))
            if blocks:
                found.append(Piece(name + title, blocks))
    return found


def _sections(text: str) -> Iterator[tuple[str, int, int]]:
    begins = [match.start() for match in _SECTION.finditer(text)]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
        title = text[begin : text.index("\n", begin)].removeprefix("## ")
        yield "#" + title.lower().replace(" ", "-"), begin, end


def _blocks(page: str, text: str, begin: int, end: int) -> Iterator[Block]:
    before: re.Match[str] | None = None
    for match in _BLOCK.finditer(text, begin, end):
        said = dict(_COMMENT.findall(match["comments"]))
        directly = before is not None and not text[before.end() : match.start()].strip()
        yield Block(
            place=f"{page}:{text.count(chr(10), 0, match.start('language')) + 1}",
            language=match["language"],
            text=match["text"],
            directly_behind_a_command=before is not None and before["language"] in COMMANDS and directly,
            not_run=said.get("not run"),
            varies=said.get("varies"),
        )
        before = match


def same(expected: str, printed: str, varies: str | None = None) -> bool:
    """Return whether a page shows what was printed.

    `...` stands for any text, including none and several lines. The amount of white space may differ, so that a long line
    can be broken. Text that matches `varies` may be any other text that matches it.
    """
    parts = r"(?P<rest>\.\.\.)|(?P<space>\s+)" + (rf"|(?P<varies>{varies})" if varies else "")
    pattern, at = "", 0
    for match in re.finditer(parts, expected.strip()):
        pattern += re.escape(expected.strip()[at : match.start()])
        pattern += {"rest": ".*?", "space": r"\s*", "varies": f"(?:{varies})"}[match.lastgroup or ""]
        at = match.end()
    pattern += re.escape(expected.strip()[at:])
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None
