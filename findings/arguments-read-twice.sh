#!/usr/bin/env bash
# Guess: a tool of the MCP SDK gets the text that the model wrote as an argument, if the tool's schema allows a text there.
# Instead (mcp 2.3.0): only a parameter that is annotated `str` alone gets it. For `str | None` and `str | list[str]` the server
# reads the text as JSON first: `null` arrives as None, and a text that spells an object or a list is refused as not being a
# text, or arrives as the list. Numbers, `true` and quoted words stay texts. The schema in `tools/list` says string, or null.
# Hurts: tools whose optional parameter takes code, JSON or a word to search for. A model is refused for a call that its schema
# allows, or the tool runs without the word; an environment that rewards by the result punishes the right call.
# Here: the router passes the arguments of a call on as they were sampled.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check mcp==2.3.0
"$tmp/venv/bin/python" - <<'PY'
import asyncio
import logging
import sys
from importlib.metadata import version

from mcp import Client
from mcp.server import MCPServer

logging.disable()
server = MCPServer("notes")
arrived: list[object] = []


@server.tool()
def plain(word: str) -> None:
    arrived.append(word)


@server.tool()
def optional(word: str | None = None) -> None:
    arrived.append(word)


@server.tool()
def either(word: str | list[str]) -> None:
    arrived.append(word)


WORDS = ["null", '{"a": 1}', '["a"]', "12", "true", '"quoted"', "word"]
REFUSED = "(refused)"


async def main() -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    async with Client(server) as client:
        for tool in (await client.list_tools()).tools:
            print(tool.name, tool.input_schema["properties"]["word"])
            found[tool.name] = []
            for word in WORDS:
                arrived.clear()
                result = await client.call_tool(tool.name, {"word": word})
                found[tool.name].append(REFUSED if result.is_error else arrived[0])
                print(f"  {word!r:12} {found[tool.name][-1]!r}")
    return found


print("mcp", version("mcp"))
SEEN = {
    "plain": WORDS,
    "optional": [None, REFUSED, REFUSED, *WORDS[3:]],
    "either": [REFUSED, REFUSED, ["a"], *WORDS[3:]],
}
sys.exit("changed" if asyncio.run(main()) != SEEN else 0)
PY
