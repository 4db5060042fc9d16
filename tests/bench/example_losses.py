# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPU-hours that the example fleets lose with a plan and in other ways. Used by the benchmarks lost_vs_*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import turns_floor
import yaml

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import forecast, options, plan
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import Policy

FLEETS = Path(__file__).parents[2] / "examples" / "fleets"
AIM = 0.1
FLOOR_HOURS = 8
"""``floor`` is what any plan of this length loses at least, so ``floor_ratio`` is the least that a ratio could be."""
FEW = 0.1
"""The aim holds for fleets of which at most this share of the work can neither be saved nor finish in time."""


def line(way: str) -> dict[str, Any]:
    """Loss over the peer's on each example that can be upgraded, and on those the aim holds for together."""
    fleets = {}
    for name in sorted(path.stem for path in FLEETS.glob("*.json")):
        policy = policy_of(name)
        snapshot = fleet.read(str(FLEETS / f"{name}.json"))
        made = plan.make(snapshot, policy)
        if made.impossible:
            continue
        ours = forecast.forecast(snapshot, policy, made).lost / 3600
        peer = forecast.forecast_peer(way, snapshot, policy, made).lost / 3600
        floor = turns_floor.least(snapshot, policy, max(len(b.nodes) for b in made.batches), FLOOR_HOURS)
        cold = _cold_share(snapshot, made)
        fleets[name] = {
            "ratio": round(ours / peer, 3) if peer else None,
            "ours": round(ours, 1),
            "peer": round(peer, 1),
            "cold_share": round(cold, 3),
            "counts": cold <= FEW,
            "floor": round(floor, 1),
            "floor_ratio": round(floor / peer, 3) if peer else None,
        }
    counted = [each for each in fleets.values() if each["counts"]]
    ours, peer = (sum(each[side] for each in counted) for side in ("ours", "peer"))
    return {
        "ratio": round(ours / peer, 3) if peer else None,
        "ours": round(ours, 1),
        "peer": round(peer, 1),
        "unit": "GPU-hours lost on the fleets of which at most a tenth starts cold",
        "aim": AIM,
        "peer_is": way,
        "fleets": fleets,
    }


def policy_of(name: str) -> Policy:
    """The policy beside an example fleet: variables of the role plan, each an option of upgrade_plan."""
    given = yaml.safe_load((FLEETS / f"{name}.yml").read_text())
    values = {key: spec.get("default") for key, spec in options.ARGUMENTS.items()}
    values.update((key[len("gpu_") :].replace("driver_version", "version"), value) for key, value in given.items())
    return options.policy_of(values)


def _cold_share(snapshot: fleet.Snapshot, made: plan.Plan) -> float:
    """The share of GPUs in use whose work starts cold in the plan."""
    gpus = {work.name: work.gpus for work in snapshot.workloads}
    cold = {fate.workload for batch in made.batches for fate in batch.fates if fate.fate == "cold_start"}
    return sum(gpus[name] for name in cold) / sum(gpus.values())
