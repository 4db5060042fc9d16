# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU to plan 10,000 nodes over CPU to plan 1,000 nodes of the same kind."""

from __future__ import annotations

import json

import large_fleet

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import plan

AIM = 14.0


def main() -> None:
    spent = []
    for nodes, workloads in ((1_000, 6_000), (10_000, 60_000)):
        snapshot = fleet.parse(json.loads(large_fleet.snapshot_text(nodes, workloads)))
        spent.append(large_fleet.seconds(lambda given=snapshot: plan.make(given, large_fleet.POLICY)))
    result = {
        "bench": "plan_growth",
        "ratio": round(spent[1] / spent[0], 2),
        "ours": round(spent[1], 3),
        "peer": round(spent[0], 3),
        "unit": "s CPU",
        "aim": AIM,
        "peer_is": "a tenth of the fleet",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
