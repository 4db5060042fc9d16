#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: upgrade_forecast
version_added: 1.0.0
short_description: Play an upgrade plan in virtual time, beside other ways of upgrading
description:
  - Says how many GPU-hours of work a plan would lose and by what cause, when it would finish and how much that varies,
    and what the same fleet would have lost in other ways. V(operator) evicts work without saving, some nodes at a time
    in list order; V(drain_and_wait) cordons and waits for work to end; V(all_at_once) evicts everything at once.
  - Runs on the controller, reads nothing but its options and changes nothing. The same options give the same forecast.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.planning
attributes:
  check_mode:
    support: full
  diff_mode:
    support: N/A
    details: This module changes nothing.
  idempotent:
    support: full
options:
  plan:
    description:
      - The plan to play, as M(gpufleet.driver.upgrade_plan) returned it, or the path of a file that holds it.
      - Without one, the plan is made from the other options first.
    type: raw
  peers:
    description: The other ways to play.
    type: list
    elements: str
    choices: [operator, drain_and_wait, all_at_once]
    default: [operator, drain_and_wait, all_at_once]
  peer_parallel:
    description: How many nodes the other ways take at a time. V(0) is as many as the largest batch of the plan.
    type: int
    default: 0
  drain_deadline:
    description: After how many seconds V(drain_and_wait) evicts what is still running.
    type: float
    default: 86400
  runs:
    description: How many runs make up the forecast, from V(1) to V(1000). V(0) is 20, or fewer in large fleets.
    type: int
    default: 0
  failure:
    description: The chance that the upgrade of a node fails and it goes back to its old driver, from V(0) to V(1).
    type: float
    default: 0
seealso:
  - module: gpufleet.driver.upgrade_plan
"""

EXAMPLES = r"""
- name: What would this upgrade cost?
  gpufleet.driver.upgrade_forecast:
    version: 580.95.05
    snapshot: fleet.json
    failure: 0.02
  delegate_to: localhost
  register: forecast

- name: Show it
  ansible.builtin.debug:
    var: forecast.table
"""

RETURN = r"""
forecasts:
  description:
    - One entry a way, V(plan) first, with C(way), C(lost_gpu_hours), C(lost_gpu_hours_spread) (tenth, fiftieth and
      ninetieth percentile), C(lost_by_cause), C(swap_gpu_hours), C(finish_seconds), C(finish_seconds_spread), C(moves),
      C(cold_starts), C(waits), C(failed_nodes), and C(curve), the GPUs by driver version and those down over time in
      the first run.
  type: list
  elements: dict
  returned: success
table:
  description: The forecasts as lines of text.
  type: list
  elements: str
  returned: success
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import answers
from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import BadSnapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import options, table
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.forecast import PEERS, Chances, beside
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy

SPEC: dict[str, Any] = {
    "argument_spec": {
        **options.ARGUMENTS,
        "plan": {"type": "raw"},
        "peers": {"type": "list", "elements": "str", "choices": list(PEERS), "default": list(PEERS)},
        "peer_parallel": {"type": "int", "default": 0},
        "drain_deadline": {"type": "float", "default": 86400},
        "runs": {"type": "int", "default": 0},
        "failure": {"type": "float", "default": 0},
    },
    "mutually_exclusive": [("nodes", "snapshot")],
    "required_one_of": [("nodes", "snapshot")],
}


def answer(given: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    try:
        found = beside(
            options.snapshot_of(given),
            options.policy_of(given),
            options.earlier_of(given["plan"]),
            given["peers"],
            Chances(runs=given["runs"], failure=given["failure"]),
            parallel=given["peer_parallel"],
            drain_deadline=given["drain_deadline"],
        )
    except (BadSnapshot, BadPolicy, OSError) as exc:
        raise answers.Failed(f"No forecast for {given['version']}: {exc}") from exc
    told = table.beside(found, windows=bool(given["windows"]))
    return {"changed": False, "forecasts": [each.as_dict() for each in found], "table": told}


def main() -> None:
    answers.give(AnsibleModule(**SPEC, supports_check_mode=True), answer)


if __name__ == "__main__":
    main()
