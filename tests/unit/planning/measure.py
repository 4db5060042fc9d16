# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How much more than the least possible the planner's plans lose, over fleets made from seeds.

The least possible of the fleets of :data:`SEEDS` is kept in ``optima.json``, under a digest of all it follows from: a
fleet, model or plan that is another finds nothing there, and is solved anew. ``python -m unit.planning.measure``, from
``tests/``, writes that file again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import plan
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import Policy

from . import optimum
from .fleets import NEW, small_fleet

MEAN, WORST = 0.05, 0.25
MAX_WAIT = 900
SEEDS = range(200)

_KNOWN = Path(__file__).with_name("optima.json")
_MODEL = Path(optimum.__file__)


@dataclass(frozen=True)
class Problem:
    """A fleet, what its plan loses, and the sizes of the plan's batches with the canaries by GPU model."""

    seed: int
    snapshot: fleet.Snapshot
    lost: float
    sizes: list[int]
    canary: dict[str, int]

    @classmethod
    def of(cls, seed: int) -> Problem:
        snapshot = small_fleet(seed)
        made = plan.make(snapshot, Policy(NEW, batch_size=(2,), max_wait=MAX_WAIT))
        first = Counter(str(node.gpu_model) for node in snapshot.nodes if node.name in made.batches[0].nodes)
        sizes = [len(made.batches[0].nodes)] + [2] * (len(made.batches) - 1)
        return cls(seed, snapshot, made.total_lost, sizes, dict(first))

    @property
    def digest(self) -> str:
        """Of the model's source text and of what it is given."""
        given = [_MODEL.read_text(), fleet.dump(self.snapshot), self.sizes, self.canary, MAX_WAIT]
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]

    def least(self, seconds: float) -> tuple[float, bool]:
        return optimum.least_loss(self.snapshot, self.sizes, self.canary, MAX_WAIT, seconds)


@dataclass(frozen=True)
class Excess:
    """Loss over the proven optimum, both in GPU-seconds; ``share`` is the excess over the optimum."""

    seed: int
    ours: float
    optimum: float

    @property
    def share(self) -> float:
        return (self.ours - self.optimum) / max(self.optimum, 1.0)


@dataclass(frozen=True)
class Comparison:
    """``unproven`` fleets ran out of solver time."""

    fleets: tuple[Excess, ...]
    unproven: int

    @property
    def mean(self) -> float:
        return sum(each.share for each in self.fleets) / len(self.fleets)

    @property
    def worst(self) -> Excess:
        return max(self.fleets, key=lambda each: each.share)

    @property
    def best(self) -> Excess:
        return min(self.fleets, key=lambda each: each.share)


def known() -> dict[str, float]:
    """The least losses in ``optima.json`` by digest."""
    return {entry["digest"]: entry["least"] for entry in json.loads(_KNOWN.read_text())}


def compare(seeds: Iterable[int], seconds: float, solved: Mapping[str, float]) -> Comparison:
    """:param seconds: what the solver may take for one fleet that is not among those ``solved``."""
    found: list[Excess] = []
    unproven = 0
    for seed in seeds:
        problem = Problem.of(seed)
        least = solved.get(problem.digest)
        if least is None:
            least, proven = problem.least(seconds)
            if not proven:
                unproven += 1
                continue
        found.append(Excess(seed, problem.lost, least))
    return Comparison(tuple(found), unproven)


def main() -> None:
    entries = []
    for seed in SEEDS:
        problem = Problem.of(seed)
        least, proven = problem.least(seconds=60)
        if proven:
            entries.append({"seed": seed, "digest": problem.digest, "least": least})
        else:
            print(f"seed {seed}: not proven")
    _KNOWN.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")


if __name__ == "__main__":
    main()
