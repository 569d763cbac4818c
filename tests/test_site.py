"""The site of docs/ is whole without a forge: what pages link outside of docs/ is in it. `make docs` checks every link."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from router.version import __version__
from scripts import site_files
from tests.test_docs import ROOT


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)  # it names a function of Python

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        entries = entry.values() if isinstance(entry, dict) else entry
        return [page for one in entries for page in pages(one)]

    docs = ROOT / "docs"
    assert sorted(pages(settings["nav"])) == sorted(str(page.relative_to(docs)) for page in docs.glob("**/*.md"))


@pytest.mark.parametrize(
    ("page", "link", "led"),
    [
        ("ray.md", "[a](memory.md)", "[a](memory.md)"),
        ("ray.md", "[a](#redis)", "[a](#redis)"),
        ("ray.md", "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("ray.md", "![a](pictures/spans.svg)", "![a](pictures/spans.svg)"),
        ("ray.md", "[a](../README.md#try-it)", "[a](repository/README.md#try-it)"),
        ("ray.md", "[a](../examples/grid_world.py)", "[a](repository/examples/grid_world.py.md)"),
        ("ray.md", "[a](study/run.py)", "[a](repository/docs/study/run.py.md)"),
        ("study/README.md", "[a](../is-text-a-key.md)", "[a](../is-text-a-key.md)"),
        ("repository/README.md", "[a](docs/memory.md#redis)", "[a](../memory.md#redis)"),
        ("repository/README.md", "![a](docs/pictures/where.svg)", "![a](../pictures/where.svg)"),
        ("repository/tests/vlm_cpu/README.md", "[a](../sglang_cpu/README.md)", "[a](../sglang_cpu/README.md)"),
        ("repository/tests/sglang_cpu/README.md", "[a](../../docs/ray.md)", "[a](../../../ray.md)"),
        (
            "ray.md",
            "```sh\n[a](../README.md)\n```\n[a](../README.md)",
            "```sh\n[a](../README.md)\n```\n[a](repository/README.md)",
        ),
    ],
)
def test_links_lead_to_the_files_of_the_repository(page: str, link: str, led: str) -> None:
    assert site_files.led(page, link) == led


@pytest.mark.parametrize("page", ["README.md", "docs/development.md", "docs/is-text-a-key.md", "docs/index.md"])
def test_every_file_that_a_page_links_is_found(page: str) -> None:
    """The hook finds what a reader of the repository finds."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert links
    assert site_files.linked(site_files.uri_of(page), text) == {normpath(join(dirname(page), link)) for link in links}


def test_the_site_is_called_by_its_version() -> None:
    config = SimpleNamespace(site_name="tito-router", extra={})
    site_files.on_config(cast("Any", config))
    assert config.site_name == f"tito-router {__version__}"
    assert config.extra == {"polyfills": [site_files.SEARCH]}


def test_a_program_is_shown_as_its_source() -> None:
    path = "examples/grid_world.py"
    shown = site_files.shown(path)
    assert shown.startswith(f"# {path}\n\n````python\n")
    assert Path(ROOT / path).read_text() in shown
