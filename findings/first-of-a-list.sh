#!/usr/bin/env bash
# Guess: an agent of smolagents gets from a tool of an MCP server what the tool returned, as a list if it is one.
# Instead (smolagents 1.26.0, mcpadapt 0.1.19, mcp 1.30.0): of a list it gets the first element, with a line in the log: of three files
# that match, one. The SDK's server sends each element of a list as a text of its own, and so makes one list of nested ones; of an
# empty list, and of None, it sends nothing, and smolagents raises an error: a search that finds nothing has failed.
# `structured_output=True` gives whole lists, of tools with an annotated result; the empty one stays an error.
# Hurts: an agent whose search, listing or table has one row, and which is judged by what it found. `[]`, which is an answer, reads
# as a broken tool. The same server gives other observations to agents of other frameworks.
# Here: the router passes the results of tools on as the client sends them.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile smolagents==1.26.0 mcpadapt==0.1.19 mcp==1.30.0
cat > "$tmp/server.py" <<'PY'
from mcp.server.fastmcp import FastMCP

server = FastMCP("files", log_level="ERROR")


@server.tool()
def word() -> str:
    """Find a word."""
    return "a.py"


@server.tool()
def files() -> list[str]:
    """Find files."""
    return ["a.py", "b.py", "c.py"]


@server.tool()
def rows() -> list[list[str]]:
    """Find rows."""
    return [["a", "b"], ["c"]]


@server.tool()
def nothing() -> list[str]:
    """Find nothing."""
    return []


@server.tool()
def none() -> str | None:
    """Find nothing."""
    return None


@server.tool()
def unannotated():
    """Find files."""
    return ["a.py", "b.py"]


server.run()
PY
cat > "$tmp/agent.py" <<'PY'
import asyncio
import logging
import sys
import warnings
from importlib.metadata import version

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from smolagents import MCPClient

logging.disable()
warnings.simplefilter("ignore")
server = StdioServerParameters(command=sys.executable, args=[sys.argv[1]])
SEEN = {  # what the server sends, what smolagents gives, the same with structured_output
    "word": [["a.py"], "a.py", {"result": "a.py"}],
    "files": [["a.py", "b.py", "c.py"], "a.py", {"result": ["a.py", "b.py", "c.py"]}],
    "rows": [["a", "b", "c"], "a", {"result": [["a", "b"], ["c"]]}],
    "nothing": [[], "(ValueError)", "(ValueError)"],
    "none": [[], "(ValueError)", "(ValueError)"],
    "unannotated": [["a.py", "b.py"], "a.py", "a.py"],
}


async def sent():
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        return {name: [part.text for part in (await session.call_tool(name)).content] for name in SEEN}


def given(**options):
    results = {}
    with MCPClient(server, **options) as tools:
        for tool in tools:
            try:
                results[tool.name] = tool()
            except ValueError:
                results[tool.name] = "(ValueError)"
    return results


print(", ".join(f"{name} {version(name)}" for name in ("smolagents", "mcpadapt", "mcp")))
ways = [asyncio.run(sent()), given(), given(structured_output=True)]
found = {name: [way[name] for way in ways] for name in SEEN}
for name, (texts, plain, structured) in found.items():
    print(f"{name:12} sent {texts!s:26} smolagents {plain!r:16} structured {structured!r}")
sys.exit("changed" if found != SEEN else 0)
PY
"$tmp/venv/bin/python" "$tmp/agent.py" "$tmp/server.py"
