# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The planner against the exact optimum; the benchmark plan_vs_optimum does the same on fleets it was not made with."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Callable

import pytest

pytest.importorskip("ortools", reason="OR-tools is not installed: no exact optimum to compare with")

from .measure import MEAN, SEEDS, WORST, Problem, compare, known

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_loss_is_near_the_optimum(part: int, record_property: Callable[[str, object], None]) -> None:
    """The worst of all parts is shown at the end of the run, also of one that passes: ``tests/unit/conftest.py``."""
    seeds = SEEDS[part::PARTS]
    found = compare(seeds, 2, known())
    record_property("optimum", [(each.share, each.seed, each.ours, each.optimum) for each in found.fleets])
    assert len(found.fleets) >= len(seeds) * 0.95, f"{found.unproven} of {len(seeds)} were not solved in time"
    assert found.mean <= MEAN, found
    assert found.worst.share <= WORST, found.worst
    assert found.best.share >= -1e-6, f"better than the proven optimum: one of the two is wrong: {found.best}"


def test_what_is_kept_are_optima() -> None:
    """Each day another twentieth of them is solved again."""
    day = datetime.now(timezone.utc).toordinal()
    solved = known()
    problems = [Problem.of(seed) for seed in SEEDS[day % 20 :: 20]]
    kept = [problem for problem in problems if problem.digest in solved]
    assert len(kept) >= len(problems) / 2, "optima.json is of another model: make it again, see measure.py"
    for problem in kept:
        least, proven = problem.least(seconds=5)
        assert least == solved[problem.digest] or (not proven and least > solved[problem.digest]), problem.seed
