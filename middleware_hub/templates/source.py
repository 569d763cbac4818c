"""A chat template's source: several named ones joined to one, its syntax tree, and the date that it writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from jinja2 import Environment, nodes

_FOR_TOOLS = "{% if tools %}\n"

_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag that transformers adds: it marks the assistant's text, and affects no decision."""

_DATE = re.compile(r"""\bstrftime_now\s*\(\s*(?:"([^"\\\n]*)"|'([^'\\\n]*)')\s*\)""")
_NAME = re.compile(r"\bstrftime_now\s*\(")


def parsed(source: str) -> nodes.Template:
    """Return the tree of a template. Raises TemplateSyntaxError, and RecursionError if it is nested too deeply."""
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", source))


# Named templates --------------------------------------------------------------------------------------------------------


def joined(named: Mapping[str, str]) -> str | None:
    """Return one template for the several that older tokenizers have by name; None if there are none.

    It writes what transformers writes with `default` and `tool_use` (Hermes 3, Command R): the one for tools if there are
    tools, and `default` otherwise. The one for tools need not work without any: Hermes 3's iterates over them.
    """
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


# Dates ------------------------------------------------------------------------------------------------------------------


def tells_time(source: str) -> bool:
    """Return whether a template writes the date (gpt-oss, Llama 3.2, Mistral), in formats that its source spells."""
    dates = len(_DATE.findall(source))
    return bool(dates) and dates == len(_NAME.findall(source))


def at_time(source: str, time: float) -> str:
    """Return a template that writes the date of `time`, in seconds since 1970, whenever it is rendered.

    A conversation that began yesterday was rendered with yesterday's date, in the router's own zone. To render it again as it
    was, the calls are replaced in the source, because transformers lets nothing stand for this function.
    """
    moment = datetime.fromtimestamp(time)

    def written(call: re.Match[str]) -> str:
        text = moment.strftime(call[1] if call[1] is not None else call[2])
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    return _DATE.sub(written, source)
