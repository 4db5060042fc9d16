# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The planner against the exact optimum; the benchmark plan_vs_optimum does the same on fleets it was not made with."""

from __future__ import annotations

import pytest

from .measure import MEAN, WORST, compare

pytest.importorskip("ortools", reason="OR-tools is not installed: no exact optimum to compare with")


def test_loss_is_near_the_optimum() -> None:
    found = compare(range(0, 200, 4), seconds=2)
    assert found.proven >= 40
    assert found.mean <= MEAN, found
    assert found.worst <= WORST, found
    assert found.best >= -1e-6, f"better than the proven optimum: one of the two is wrong: {found}"
