"""The date that a chat template writes (gpt-oss, Llama 3.2, Mistral): `strftime_now("%Y-%m-%d")`, of the router's own zone.

A conversation that began yesterday was rendered with yesterday's date. To render it again as it was, the calls are replaced
in the template's source, because transformers lets nothing stand for this function.
"""

from __future__ import annotations

import re
from datetime import datetime

_CALL = re.compile(r"""\bstrftime_now\s*\(\s*(?:"([^"\\\n]*)"|'([^'\\\n]*)')\s*\)""")
_NAME = re.compile(r"\bstrftime_now\s*\(")


def tells_time(source: str) -> bool:
    """Return whether a template writes the date, in formats that its source spells."""
    calls = len(_CALL.findall(source))
    return bool(calls) and calls == len(_NAME.findall(source))


def at_time(source: str, time: float) -> str:
    """Return a template that writes the date of `time`, in seconds since 1970, whenever it is rendered."""
    moment = datetime.fromtimestamp(time)

    def written(call: re.Match[str]) -> str:
        text = moment.strftime(call[1] if call[1] is not None else call[2])
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    return _CALL.sub(written, source)
