"""The documents name commands, flags, routes, files and tests that exist, and leave out no flag and no route."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from middleware_hub import routes as hub
from middleware_hub.retrieval import retrieval
from middleware_hub.retrieval.retrieval_request import RetrievalRequest
from router.app import create_app
from router.cli import COMMANDS
from router.config import HealthConfig, RadixConfig, RouterConfig
from router.engines.form.request import UNRECORDABLE
from router.engines.table import fleet_paths
from router.flags import parser
from router.generate.fleet import Fleet
from router.http.request_state import Requests
from router.http.upstream import AiohttpUpstream
from router.policies import create_policy
from router.routes import ControlRoutes, Lifecycle
from router.workers.admission import Admission
from router.workers.health import HealthChecks
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from scripts import make_reference
from worker.models.ngram import shipped_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("tests/**/*.md"),
    ]
)
API = ROOT / "docs" / "http-api.md"
CALLS = sorted(ROOT.glob("docs/http-api/*.md"))
COMMAND_LINE = ROOT / "docs" / "command-line.md"
REFERENCE = ROOT / "docs" / "reference.md"
HERE = "127.0.0.1:30000"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")
_METRIC = re.compile(r"\btito_(?:router|radix)_\w+")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, block in _BLOCK.findall(page.read_text()):
        if language in languages:
            yield block


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in the shell blocks, without comments."""
    for block in blocks(page, "bash", "sh"):
        for command in _joined(block):
            words = shlex.split(command, comments=True)
            if words:
                yield words


def _joined(block: str) -> Iterator[str]:
    """Yield each command as one string, also if a backslash or an open quote spreads it over several lines."""
    pending = ""
    for line in block.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            shlex.split(pending, comments=True)
        except ValueError:  # a quote is open
            pending += "\n"
            continue
        yield pending
        pending = ""
    assert not pending, f"a quote that is never closed: {pending}"


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def flags(command: str = "") -> set[str]:
    """Return all flags of the router, or of one of the other commands, except --help."""
    parse = importlib.import_module(COMMANDS[command]).parser() if command in COMMANDS else parser()
    return _options(parse) - {"-h", "--help"}


def _options(parse: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser, and of the parsers of its commands."""
    commands = [action.choices.values() for action in parse._actions if isinstance(action, argparse._SubParsersAction)]
    own = {flag for action in parse._actions for flag in action.option_strings}
    return own.union(*(_options(one) for parsers in commands for one in parsers))


def routes() -> set[str]:
    """Return the paths of the router and of the hub, except those of sessions."""
    pool = WorkerPool(create_policy("random"))
    prober = Prober(AiohttpUpstream(connect_timeout=1.0), seconds=1.0)
    admission = Admission(pool, prober, HealthChecks(pool, prober, HealthConfig()))
    control = ControlRoutes(pool, admission, CollectorRegistry(), Lifecycle(), Requests())
    own = {route.path.replace("{key:rest}", "{id}") for route in control.routes()}
    own -= {"/inspect/{rest:rest}"}
    tables = (hub.RADIX_TREE, hub.TRAJECTORIES, hub.SCORES, hub.CHATS, hub.MEDIA, hub.INSPECTOR_PAGE, hub.INSPECTOR_API)
    fleet = Fleet(
        pool, AiohttpUpstream(connect_timeout=1.0), max_body_bytes=1, forward_authorization=False, paths=fleet_paths()
    )
    return own.union({route.path for route in fleet.routes()}, *tables)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if urlsplit(target).scheme:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), f"{target}: {sorted(anchors(file))}"


@every_page
def test_a_table_has_a_head_and_rows(page: Path) -> None:
    lines = ["", *prose(page).splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if re.fullmatch(r"\|( *:?-+:? *\|)+", line):
            assert {before[:1], after[:1]} == {"|"}, (before, line, after)


@every_page
def test_pictures_exist_and_have_a_description(page: Path) -> None:
    for words, target in _PICTURE.findall(prose(page)):
        assert (page.parent / target).is_file(), target
        assert len(words.split()) > 10, f"{target}: {words!r} does not describe the picture"


def test_every_picture_is_shown() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for _, target in _PICTURE.findall(prose(page))}
    pictures = set(ROOT.glob("docs/pictures/*"))
    assert pictures <= shown
    for picture in pictures:
        if picture.suffix == ".png":
            assert picture.read_bytes().startswith(b"\x89PNG"), picture
        else:
            assert ElementTree.parse(picture).getroot().get("viewBox"), picture


@every_page
def test_python_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@every_page
def test_json_is_json(page: Path) -> None:
    for block in blocks(page, "json"):
        msgspec.json.decode(block)


@every_page
def test_commands_exist(page: Path) -> None:
    """Check flags of the programs, targets of make, and scripts; for curl the path, the JSON and the content type."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        if words[0] == "tito-router" or words[1:3] == ["-m", "router"]:
            command = words[1 if words[0] == "tito-router" else 3 :][:1]
            unknown = {word for word in words if word.startswith("--")} - flags(*command)
            assert not unknown, words
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        elif words[0] == "curl":
            check_curl(words)
        elif words[0].startswith(("tests/", "docs/", "benchmarks/")):
            assert (ROOT / words[0]).is_file(), words


def check_curl(words: list[str]) -> None:
    (url,) = (urlsplit(word) for word in words if word.startswith("http"))
    assert url.netloc != HERE or url.path in routes(), words
    if "-d" in words:
        msgspec.json.decode(words[words.index("-d") + 1])
        assert "content-type: application/json" in words, words


@every_page
def test_files_and_tests_exist(page: Path) -> None:
    """Check every `path/file.py` and `path/test_file.py::test_name`, relative to the root or to the page."""
    for word in _INLINE.findall(prose(page)):
        path, _, test = word.partition("::")
        if not re.fullmatch(r"[\w.-]+/[\w./-]+\.(py|sh|md|json|txt)", path) or path.startswith("benchmarks/results"):
            continue
        found = [root / path for root in (ROOT, page.parent) if (root / path).is_file()]
        assert found, word
        assert not test or f"def {test}(" in found[0].read_text(), word


@every_page
def test_modules_that_are_run_exist(page: Path) -> None:
    """Check every `python -m` of a module of this repository, in blocks and in the text."""
    for module in re.findall(r"-m ((?:router|benchmarks|tests)\b[\w.]*\w)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@every_page
def test_flags_in_configuration_files_exist(page: Path) -> None:
    """Check the flags with which a service manager starts the router."""
    for block in blocks(page, "ini", "yaml"):
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", block)) <= flags(), block


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_flag_is_documented(command: str) -> None:
    """Each command has its table in the command line's page; the router's is in the reference, generated from the code."""
    page, heading = (COMMAND_LINE, f"## tito-router {command}") if command else (REFERENCE, "## Flags of tito-router")
    _, _, rest = page.read_text().partition(f"\n{heading}\n")
    section, _, _ = rest.partition("\n## ")
    rows = re.findall(r"^\| `(--[\w-]+)[^`]*` \|[^|]*\| (.*) \|$", section, re.MULTILINE)
    assert {flag for flag, _ in rows} == flags(command), f"the tables under {heading!r} in {page.name}"
    assert all(meaning for _, meaning in rows), f"a flag under {heading!r} in {page.name} has no meaning"


def test_the_reference_is_what_the_code_says() -> None:
    page = REFERENCE.read_text()
    assert make_reference.made(page) == page, "docs/reference.md is out of date: run `make reference`"


def test_the_reference_has_what_a_router_shows() -> None:
    """The reference has every metric of a router with its middleware, under the same name and with the same labels."""
    config = RouterConfig(radix=RadixConfig(tokenizer_path=str(shipped_tokenizer())))
    shown = {
        (sample.name if metric.type == "counter" else metric.name, metric.type)
        for metric in create_app(config).registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")  # the command line switches these off
    }
    made = {(name, kind): labels for name, kind, labels, _ in make_reference.metrics()}
    assert shown <= made.keys()
    assert made["tito_router_worker_routable", "gauge"] == ("worker", "state")
    assert made["tito_router_requests_total", "counter"] == ("route", "status")
    assert made["tito_radix_evictions_total", "counter"] == ("reason",)


@every_page
def test_metrics_exist(page: Path) -> None:
    """A page names only metrics of the reference, with the suffixes that they have there."""
    known = {
        name + suffix
        for name, kind, _, _ in make_reference.metrics()
        for suffix in (("", "_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    assert set(_METRIC.findall(page.read_text())) <= known


@pytest.mark.parametrize(
    ("index", "pages"), [("docs/index.md", "docs/*.md"), ("docs/http-api.md", "docs/http-api/*.md")]
)
def test_every_page_is_in_the_index(index: str, pages: str) -> None:
    linked = {(ROOT / "docs" / target.partition("#")[0]) for target in _LINK.findall((ROOT / index).read_text())}
    assert {*ROOT.glob(pages)} - linked - {ROOT / index} == set()


def test_every_route_is_documented() -> None:
    """The table of the HTTP API has a row for each route, and the page that the row links names the call."""
    rows = re.findall(r"^\| .*\[`([A-Z]+) (/[^`]*)`\]\(([^)#]+)", API.read_text(), re.MULTILINE)
    agents = {
        *hub.MODELS,
        *hub.SESSIONS,
        *hub.SESSION_CONTROLS,
        *hub.SESSION_CHATS,
    }  # a test of sessions has their methods
    assert {path for _, path, _ in rows} == routes() | agents
    assert len(rows) == len({(method, path) for method, path, _ in rows})
    for method, path, page in rows:
        text = (API.parent / page).read_text()
        below = path.removeprefix("/sessions/{id}")  # turns are there at the root, too
        assert f"`{method} {path}" in text or f"`{method} {below}" in text or f"# {method} {path}\n" in text, (
            path,
            page,
        )


def test_no_page_names_another_route() -> None:
    known = routes() | {*hub.MODELS}
    for page in (API, *CALLS):
        named = set(re.findall(r"\b(?:GET|POST|DELETE) (/[\w/{}:]*)", page.read_text()))
        assert {path for path in named if not path.startswith("/sessions")} <= known, page.name


def test_every_field_of_a_retrieval_is_documented() -> None:
    """The tables have all that a request may ask for, and all that `answer_of` answers."""
    (answer,) = ast.parse(inspect.getsource(retrieval.answer_of)).body
    keys = {
        key.value
        for node in ast.walk(answer)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    }
    assert {"tokens", "exact_chars"} <= keys, "the answer is made in another form: read its fields in another way"
    page = (ROOT / "docs" / "http-api" / "retrieve.md").read_text()
    _, _, section = f"\n{page}".partition("\n# POST /retrieve_from_text\n")
    cells = re.findall(r"^\| (`[^|]*) \|", section.partition("\n## ")[0], re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    asked = set(RetrievalRequest.__struct_fields__) - {"ignored"}
    assert (keys | asked) - named == set(), "no row in docs/http-api/retrieve.md"


def test_what_is_not_recorded_is_documented() -> None:
    """The table of limits has the words that `unrecordable` returns."""
    (function,) = (
        node
        for file in (ROOT / "router").glob("**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "unrecordable"
    )
    reasons = {
        node.value.value
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value is not None
    } | set(UNRECORDABLE.values())
    _, _, limits = (ROOT / "docs" / "http-api" / "limits.md").read_text().partition("## Limits")
    rows = set(re.findall(r"^\| `([^`]+)` \|", limits, re.MULTILINE))
    assert rows == reasons, "the table under Limits in docs/http-api/limits.md"


def test_the_tree_of_the_architecture_names_every_folder() -> None:
    """Each package of the code has its line, indented by its depth, in docs/architecture.md."""
    _, _, rest = (ROOT / "docs" / "architecture.md").read_text().partition("## The tree")
    named, path = set(), [""] * 9
    for indent, name in re.findall(r"^( *)([a-z_]+)/(?: |$)", rest.partition("\n## ")[0], re.MULTILINE):
        depth = len(indent) // 2
        path[depth] = name
        named.add("/".join(path[: depth + 1]))
    packages = [
        file.parent for top in ("router", "middleware_hub", "worker") for file in (ROOT / top).glob("**/__init__.py")
    ]
    assert named == {str(package.relative_to(ROOT)) for package in packages}


def test_the_messages_of_the_runbook_are_in_the_code() -> None:
    """What docs/operations.md quotes from logs and errors, piece by piece: numbers, paths and `...` stand for anything."""
    said = "\n".join(
        node.value
        for top in ("router", "middleware_hub", "worker")
        for file in (ROOT / top).glob("**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    _, _, page = (ROOT / "docs" / "operations.md").read_text().partition("### Logs")
    quoted = [words for words in _INLINE.findall(_BLOCK.sub("", page)) if re.match(r"(GET /\w+ )?[a-z']+ [a-z]", words)]
    pieces = [
        piece.strip(" :")
        for words in quoted
        if not words.startswith(("pip ", "python ", "ulimit "))
        for piece in re.split(r"\.\.\.|\d+|\([^)]*\)|GET /\w+", words)
    ]
    assert len(pieces) > 20
    assert [piece for piece in pieces if piece not in said] == []
