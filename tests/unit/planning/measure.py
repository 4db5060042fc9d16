# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How much more than the least possible the planner's plans lose, over fleets made from seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ansible_collections.gpufleet.driver.plugins.module_utils.planning import plan
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import Policy

from .fleets import NEW, small_fleet
from .optimum import least_loss

MEAN, WORST = 0.05, 0.25
MAX_WAIT = 900


@dataclass(frozen=True)
class Comparison:
    """Excesses of loss over the proven optimum, as shares of it; ``unproven`` fleets ran out of solver time."""

    mean: float
    worst: float
    worst_seed: int
    best: float
    proven: int
    unproven: int
    ours: float
    optimum: float


def compare(seeds: Iterable[int], seconds: float) -> Comparison:
    """:param seconds: what the solver may take for one fleet."""
    excess: list[tuple[float, int]] = []
    unproven = 0
    ours = optimum = 0.0
    for seed in seeds:
        snapshot = small_fleet(seed)
        made = plan.make(snapshot, Policy(NEW, batch_size=(2,), max_wait=MAX_WAIT))
        first = Counter(node.gpu_model for node in snapshot.nodes if node.name in made.batches[0].nodes)
        sizes = [len(made.batches[0].nodes)] + [2] * (len(made.batches) - 1)
        least, proven = least_loss(snapshot, sizes, dict(first), MAX_WAIT, seconds)
        if not proven:
            unproven += 1
            continue
        ours += made.total_lost
        optimum += least
        excess.append(((made.total_lost - least) / max(least, 1.0), seed))
    worst, seed = max(excess)
    mean = sum(each for each, dummy in excess) / len(excess)
    return Comparison(mean, worst, seed, min(excess)[0], len(excess), unproven, ours, optimum)
