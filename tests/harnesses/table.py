"""Write docs/harnesses.md from the rows of a run: `python -m tests.harnesses.table FOLDER`.

FOLDER is what `TITO_HARNESSES_OUT` named while `make test-harnesses` ran. A harness without a row has no line: all that the
page's tables say is from that run.
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.harnesses.families import FAMILIES
from tests.harnesses.harness import harnesses

PAGE = Path(__file__).resolve().parents[2] / "docs" / "harnesses.md"
BEGIN, END = "<!-- NAME begins -->", "<!-- NAME ends -->"
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
    """Return the table of all harnesses, with the models of the first family."""
    one = sum(told["trajectories"] == 1 and told["trained"] == told["sampled"] for told in rows)
    told = f"Run on {day.isoformat()}: {one} of {len(rows)} give one trajectory that has every sampled token."
    return "\n".join([told, "", *_lines(COLUMNS, map(row, rows))])


def families(rows: list[dict[str, Any]]) -> str:
    """Return the table of the harnesses that ran with several families: a column for each of these."""
    names = [family.name for family in FAMILIES]
    found = {(told["name"], told["family"]): told for told in rows}
    several = dict.fromkeys(told["name"] for told in rows if told["family"] != names[0])
    lines = ([name, *(_cell(found.get((name, family))) for family in names)] for name in several)
    return "\n".join(_lines(("harness", *names), lines))


SCENES = {
    "agents": "the task calls a sub-agent",
    "handoff": "the task is handed over to another agent",
    "compaction": "the history is summed up",
}


def scenes(rows: list[dict[str, Any]]) -> str:
    """Return the table of the scenes: which trajectories there are of whose turns."""
    columns = ("harness", "what happens", "its trajectories", "head", "trained on", "the router says")
    return "\n".join(_lines(columns, map(_scene, sorted(rows, key=lambda told: list(SCENES).index(told["scene"])))))


def _scene(told: dict[str, Any]) -> list[str]:
    return [
        told["name"],
        SCENES[told["scene"]],
        "<br>".join(_part(whose, root, side) for whose, root, side in told["parts"]),
        "the task's last turn" if told["is_head"] else "another",
        f"{told['trained'] / told['sampled']:.1%}",
        ", ".join(f"`{word}`" for word in told["reasons"]),
    ]


def _part(whose: list[str], root: int, is_side: bool) -> str:
    """Name the turns of a trajectory, in their order: those of one conversation that follow each other together."""
    names = {"task": "task", "beside": "the other", "side": "side request"}
    found = " + ".join(f"{names[who]} {len(list(turns))}" for who, turns in itertools.groupby(whose))
    return f"{found} (root {root}{', `side_request`' if is_side else ''})"


def _cell(told: dict[str, Any] | None) -> str:
    if told is None:
        return ""
    reasons = "".join(f", `{word}`" for word in told["reasons"])
    return f"{told['trajectories']}, {told['trained'] / told['sampled']:.1%}, {told['reused'] / told['reusable']:.1%}{reasons}"


def _lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(one)} |" for one in rows)]


def main(folder: str) -> None:
    order = {one.name: number for number, one in enumerate([*harnesses(), *harnesses(scenes=True)])}
    paths = list(Path(folder).glob("*.json"))
    rows = sorted((json.loads(path.read_text()) for path in paths), key=lambda told: order[told["name"]])
    day = max(datetime.date.fromtimestamp(path.stat().st_mtime) for path in paths)
    page = PAGE.read_text()
    tasks = [told for told in rows if not told["scene"]]
    tables = {
        "the table": table([told for told in tasks if told["family"] == FAMILIES[0].name], day),
        "the table of families": families(tasks),
        "the table of scenes": scenes([told for told in rows if told["scene"]]),
    }
    for name, lines in tables.items():
        begin, end = BEGIN.replace("NAME", name), END.replace("NAME", name)
        page = f"{page[: page.index(begin) + len(begin)]}\n\n{lines}\n\n{page[page.index(end) :]}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1])
