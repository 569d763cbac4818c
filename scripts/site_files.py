"""Adds to the site of docs/ what MkDocs leaves out: the files of the repository that pages link, and the version.

MkDocs calls the functions named `on_...` (mkdocs.yml names this file). A file outside of docs/ that a page links becomes a
page below `repository/`: Markdown as it is, anything else as its source. So the site needs no forge, and shows the files of
its own version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING

from router.version import __version__

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "repository/"
SEARCH = "assets/iframe-worker.js"
"""A script of this name is what the plugin `offline` leaves to us; any other, and it takes one from another server."""

_FENCED = re.compile(r"(^(`{3,}).*?^\2$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=(?:#[^)\s]*)?\))")
_LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".toml": "toml", ".yaml": "yaml"}


def on_config(config: MkDocsConfig) -> None:
    """Put the version into the name of the site, and search into pages that are opened as files."""
    config.site_name = f"{config.site_name} {__version__}"
    config.extra["polyfills"] = [SEARCH]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add a page for each file outside of docs/ that a page links, and for those that these pages link."""
    from mkdocs.structure.files import File, InclusionLevel  # only `make docs` installs it

    files.append(File.generated(config, SEARCH, abs_src_path=str(ROOT / "scripts" / "iframe_worker.js")))
    ahead = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while ahead:
        page, text = ahead.pop()
        for path in linked(page, text):
            uri = uri_of(path)
            if not uri.startswith(OUTSIDE) or files.get_file_from_path(uri) or not (ROOT / path).is_file():
                continue
            content = shown(path)
            files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
            ahead.append((uri, content))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where the files are in the site."""
    return led(page.file.src_uri, markdown)


def led(page: str, text: str) -> str:
    """Return the Markdown of a page of the site, whose links are as in the repository, with those of the site."""
    return _each_link(text, lambda name: relpath(uri_of(_path(page, name)), dirname(page) or "."))


def linked(page: str, text: str) -> set[str]:
    """Return the paths in the repository that a page of the site links."""
    found: set[str] = set()

    def note(name: str) -> str:
        found.add(_path(page, name))
        return name

    _each_link(text, note)
    return found


def uri_of(path: str) -> str:
    """Return where a file of the repository is in the site."""
    if path.startswith("docs/") and not path.endswith((".py", ".txt")):  # as in exclude_docs
        return path.removeprefix("docs/")
    return OUTSIDE + (path if path.endswith(".md") else f"{path}.md")


def shown(path: str) -> str:
    """Return a file of the repository as Markdown."""
    file = ROOT / path
    text = file.read_text(encoding="utf-8")
    return text if file.suffix == ".md" else f"# {path}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{text}````\n"


def _path(page: str, name: str) -> str:
    """Return the path in the repository of what a page of the site links as `name`."""
    own = page.removeprefix(OUTSIDE) if page.startswith(OUTSIDE) else f"docs/{page}"
    return normpath(join(dirname(own), name))


def _each_link(markdown: str, to: Callable[[str], str]) -> str:
    """Replace the file of each link, and of each picture, outside of code blocks; those to other sites stay."""
    pieces = re.split(_FENCED, markdown)  # text, block, its fence, text, ...
    texts = [_LINK.sub(lambda link: to(link[0]), text) for text in pieces[0::3]]
    return "".join(text + block for text, block in zip(texts, [*pieces[1::3], ""], strict=True))
