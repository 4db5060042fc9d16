# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Node, Snapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.host_list import groups, hosts


@pytest.mark.parametrize(
    ("node", "needs", "expected"),
    [
        (Node("n", "H100", 8, "570.1", domains={"partition": "gpu"}), True,
         ["gpu_nodes", "gpu_model_H100", "gpu_driver_570.1", "gpu_pool_gpu", "gpu_needs_upgrade"]),
        (Node("n", None, 8, None, cordoned_by="kubectl-cordon"), None,
         ["gpu_nodes", "gpu_driver_unknown", "gpu_cordoned"]),
    ],
)  # fmt: skip
def test_groups(node: Node, needs: bool | None, expected: list[str]) -> None:
    (host,) = hosts(Snapshot((node,)), {})
    facts: dict[str, Any] = {**host["facts"], "needs_upgrade": needs}
    assert groups(facts) == expected


def test_hosts_can_be_cached_as_json() -> None:
    found = hosts(Snapshot((Node("a", "H100", 8, domains={"rack": "r1"}), Node("b"))), {"a": "10.0.0.1"})
    assert json.loads(json.dumps(found)) == found
    assert [host["address"] for host in found] == ["10.0.0.1", None]
