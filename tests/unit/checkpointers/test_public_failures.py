# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/public-failures.md names for each failure a test that there is, and every row that it names in one is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
ROWS = dict(
    re.findall(r"^\| (C-\d\d) \|.*\| `([^`|]+)`[^|]*\|$", (TOP / "docs/public-failures.md").read_text(), re.MULTILINE)
)


def source(name: str) -> str:
    folder = TOP / "tests/integration" if "/" in name else Path(__file__).parent
    return (folder / name).read_text()


def test_there_is_a_row_for_each() -> None:
    assert list(ROWS) == [f"C-{number:02}" for number in range(1, 59)]


@pytest.mark.parametrize("row", ROWS)
def test_the_test_of_a_row_is_there(row: str) -> None:
    file, dummy, name = ROWS[row].partition("::")
    assert f"def {name}(" in source(file) if name else source(file)


def test_every_id_in_a_test_is_that_of_its_row() -> None:
    text = (TOP / "docs/public-failures.md").read_text()
    for path in Path(__file__).parent.glob("test_*.py"):
        for row, where, number in re.findall(r"(C-\d\d)-([\w-]+?)(?:#|-pull-)(\d+)", path.read_text()):
            (line,) = [one for one in text.splitlines() if one.startswith(f"| {row} ")]
            assert where in line and f"#{number}" in line, f"{path.name}: {row}-{where}#{number}"
