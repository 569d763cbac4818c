"""Write docs/harnesses.md from the rows of a run: `python -m tests.harnesses.table FOLDER`.

FOLDER is what `TITO_HARNESSES_OUT` named while `make test-harnesses` ran. A harness without a row has no line: all that the
page says is from that run.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from tests.harnesses.harness import harnesses

PAGE = Path(__file__).resolve().parents[2] / "docs" / "harnesses.md"
BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"
COLUMNS = (
    "harness",
    "dialect",
    "turns",
    "trajectories",
    "trained on",
    "kept",
    "side requests",
    "what its echoes change",
)


def row(told: dict[str, Any]) -> list[str]:
    """Return the cells of one harness."""
    packages = "<br>".join(f"{told['name']}" if not told["packages"] else package for package in told["packages"][:2])
    changes = ", ".join(told["changes"]) or "nothing"
    changes += f" ({told['because']})" if told["because"] else ""
    reasons = ", ".join(f"`{word}`" for word in told["reasons"])
    return [
        f"{told['name']}<br><small>{packages}</small>",
        told["dialect"],
        str(told["turns"]),
        str(told["trajectories"]) + (f" with `match: {told['match']}`" if told["match"] else ""),
        f"{told['trained'] / told['sampled']:.0%}",
        f"{told['reused'] / told['reusable']:.1%}" if told["reusable"] else "",
        str(told["side"]) + (f" (refused: {', '.join(map(str, told['statuses']))})" if told["statuses"] else ""),
        changes + (f"; the router says {reasons}" if reasons else ""),
    ]


def table(rows: list[dict[str, Any]], day: datetime.date) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row(one)) + " |" for one in rows]
    one = sum(told["trajectories"] == 1 and told["trained"] == told["sampled"] for told in rows)
    told = f"Run on {day.isoformat()}: {one} of {len(rows)} give one trajectory that has every sampled token."
    return "\n".join([told, "", *lines])


def main(folder: str) -> None:
    found = [Path(folder, f"{one.name}.json") for one in harnesses()]
    rows = [json.loads(path.read_text()) for path in found if path.exists()]
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    day = max(datetime.date.fromtimestamp(path.stat().st_mtime) for path in found if path.exists())
    PAGE.write_text(f"{before}\n\n{table(rows, day)}\n\n{after}")


if __name__ == "__main__":
    main(sys.argv[1])
