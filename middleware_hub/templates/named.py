"""One template for the several that older tokenizers have by name: `default` and `tool_use` (Hermes 3, Command R).

Transformers takes the one for tools if there are tools, and `default` otherwise. The one for tools need not work without any:
Hermes 3's iterates over them. Joined in one source, both are rendered, and searched, as any other template.
"""

from __future__ import annotations

from collections.abc import Mapping

_FOR_TOOLS = "{% if tools %}\n"


def one_of(named: Mapping[str, str]) -> str | None:
    """Return the source of a template that writes what transformers writes with these; None if there are none."""
    tools, default = named.get("tool_use"), named.get("default")
    if not tools or not default:
        return tools or default or next(iter(named.values()), None)
    tools, default = (source.replace("\r\n", "\n").replace("\r", "\n") for source in (tools, default))
    # Jinja drops a newline after a block, and one at the end of a template; `+` keeps spaces in front of a block.
    first, last = (source.removesuffix("\n") for source in (tools, default))
    return f"{_FOR_TOOLS}{first}{{%+ else %}}\n{last}{{%+ endif %}}"


def differs_with_tools(source: str) -> bool:
    """Return whether a template was joined here: without tools, it is another one that may know no calls."""
    return source.startswith(_FOR_TOOLS)
