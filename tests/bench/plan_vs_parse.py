# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU to plan 10,000 nodes and 60,000 workloads, over json.loads of the same snapshot."""

from __future__ import annotations

import json

import large_fleet

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import plan

AIM = 3.0


def main() -> None:
    text = large_fleet.snapshot_text(10_000, 60_000)
    peer = large_fleet.seconds(lambda: json.loads(text))
    data = json.loads(text)
    check = large_fleet.seconds(lambda: fleet.parse(data))
    snapshot = fleet.parse(data)
    ours = large_fleet.seconds(lambda: plan.make(snapshot, large_fleet.POLICY))
    made = plan.make(snapshot, large_fleet.POLICY)
    result = {
        "bench": "plan_vs_parse",
        "ratio": round(ours / peer, 2),
        "ours": round(ours, 3),
        "peer": round(peer, 3),
        "unit": "s CPU",
        "aim": AIM,
        "peer_is": "json.loads of the same snapshot",
        "ratio_with_checking_the_snapshot": round((ours + check) / peer, 2),
        "nodes": len(snapshot.nodes),
        "workloads": len(snapshot.workloads),
        "batches": len(made.batches),
        "snapshot_mb": round(len(text) / 1e6, 1),
        "peak_memory_over_snapshot": round(large_fleet.peak_memory(text) / len(text), 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
