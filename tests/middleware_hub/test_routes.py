"""The table of the hub's routes: no path has two owners, and each part has a function for each of its calls."""

from __future__ import annotations

import pytest

from middleware_hub import routes
from middleware_hub.routes import Table, bound, find
from router.auth.permissions import of_the_hub

CALLS: Table = {"/a": {"GET": "show", "POST": "make"}, "/a/{id}": {"GET": "show"}}


def test_a_path_has_one_owner() -> None:
    tables = [table for name, table in vars(routes).items() if name.isupper() and isinstance(table, dict)]
    assert len(tables) == 11
    paths = [path for table in tables for path in table]
    assert len(paths) == len(set(paths))


def test_the_router_knows_which_paths_no_worker_has() -> None:
    """Without the middlewares it says so, in place of a worker."""
    tables = routes.RADIX_TREE, routes.TRAJECTORIES, routes.SCORES, routes.MEDIA
    assert [path for table in tables for path in table if not of_the_hub(path)] == ["/generate"]


def test_a_row_gets_the_functions_of_its_calls() -> None:
    found = bound(CALLS, {"show": "shown", "make": "made"}, "/a")
    assert found == {"": {"GET": "shown", "POST": "made"}, "/{id}": {"GET": "shown"}}


@pytest.mark.parametrize("calls", [{"show": 1}, {"show": 1, "make": 2, "drop": 3}])
def test_a_call_without_a_function_or_a_route_is_a_mistake(calls: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="make" if "make" not in calls else "drop"):
        bound(CALLS, calls)


ROWS = {"run": 1, "talks": 2, "talks/{id}": 3, "talks/{id}/parts/{part}": 4, "talks/{id}/parts/{part}/file": 5}


@pytest.mark.parametrize(
    ("segments", "row"),
    [
        (["run"], (1, [])),
        (["talks"], (2, [])),
        (["talks", "a/b"], (3, ["a/b"])),
        (["talks", "{id}"], (3, ["{id}"])),
        (["talks", "talks", "parts", "0"], (4, ["talks", "0"])),
        (["talks", "x", "parts", "0", "file"], (5, ["x", "0"])),
        ([], None),
        (["{id}"], None),
        (["run", "run"], None),
        (["talks", "x", "party", "0"], None),
        (["talks", "x", "parts", "0", "folder"], None),
        (["talks", "x", "parts", "0", "file", "y"], None),
    ],
)
def test_a_row_is_found_with_its_names(segments: list[str], row: tuple[int, list[str]] | None) -> None:
    assert find(ROWS, segments) == row
