"""One log from several processes."""

from __future__ import annotations

import random

import pytest

from router.processes import child_process
from router.processes.child_process import LineWriter


@pytest.mark.parametrize("numbered", [True, False])
def test_lines_stay_whole(numbered: bool, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """However the pieces of several processes are cut and mixed."""
    dice = random.Random(0)
    lines = {number: [b"%d: %s" % (number, b"x" * dice.randrange(200)) for _ in range(50)] for number in (1, 2, 3)}
    left = {number: b"\n".join(each) + b"\n" for number, each in lines.items()}
    writer = LineWriter(numbered=numbered)
    while any(left.values()):
        number = dice.choice([number for number, data in left.items() if data])
        size = dice.randrange(1, 300)
        writer.write(number, left[number][:size])
        left[number] = left[number][size:]
    found = capfdbinary.readouterr().err.splitlines()
    for number, each in lines.items():
        mark = b"%d| " % number if numbered else b""
        assert [line for line in found if line.startswith(mark + b"%d: " % number)] == [mark + line for line in each]
    assert len(found) == 150


def test_the_end_of_a_process_ends_its_line(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    writer = LineWriter(numbered=True)
    writer.write(1, b"half a")
    writer.write(2, b"whole\n")
    writer.end(1)
    writer.end(2)
    assert capfdbinary.readouterr().err == b"2| whole\n1| half a\n"


def test_a_line_without_end_is_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(child_process, "LONGEST_LINE", 10)
    writer = LineWriter(numbered=False)
    writer.write(1, b"a line\nand one that does not end")
    assert capfdbinary.readouterr().err == b"a line\nand one that does not end\n"
