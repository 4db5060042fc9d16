#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: workload_placement
version_added: 1.0.0
short_description: Find nodes on which workloads could be restored, or started, now
description:
  - Places the workloads of a snapshot on other nodes of it, one after another by priority and size. A restore needs a
    node whose driver and every other field of the compatibility key agree; a start needs room and admission only.
  - A gang is placed as a whole or not at all. Nodes upgraded later come first, then the tightest fit.
  - Runs on the controller, reads nothing but its options and changes nothing.
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
  workloads:
    description: Names of the workloads to place. What they hold now is not freed for each other.
    type: list
    elements: str
    required: true
  restore:
    description: Whether they are to be restored from a checkpoint, rather than started from nothing.
    type: bool
    default: true
  avoid:
    description: Names of nodes on which nothing may land, for example those of the batch about to be upgraded.
    type: list
    elements: str
    default: []
  plan:
    description: A plan whose order says which nodes are upgraded later, as a dictionary or the path of a file.
    type: raw
seealso:
  - module: gpufleet.driver.upgrade_plan
"""

EXAMPLES = r"""
- name: Where could the job go before its node is upgraded?
  gpufleet.driver.workload_placement:
    version: 580.95.05
    snapshot: fleet.json
    workloads: [train-7]
    avoid: [gpu-node-01, gpu-node-02]
  delegate_to: localhost
  register: placed
"""

RETURN = r"""
placements:
  description:
    - One entry a workload, with C(workload), C(to) (the nodes for its members, in their order; empty if there is no
      place) and C(refused) (why no node takes it, the most frequent reason first, such as C(no_room:gpu 4 of 8) or
      C(key_mismatch:driver)).
  type: list
  elements: dict
  returned: success
placed:
  description: Whether every workload has a place.
  type: bool
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import BadSnapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import options
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.plan import place
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **options.ARGUMENTS,
            "workloads": {"type": "list", "elements": "str", "required": True},
            "restore": {"type": "bool", "default": True},
            "avoid": {"type": "list", "elements": "str", "default": []},
            "plan": {"type": "raw"},
        },
        mutually_exclusive=[("nodes", "snapshot")],
        required_one_of=[("nodes", "snapshot")],
        supports_check_mode=True,
    )
    given = module.params
    try:
        found = place(
            options.snapshot_of(given),
            options.policy_of(given),
            given["workloads"],
            restore=given["restore"],
            avoid=given["avoid"],
            plan=options.earlier_of(given["plan"]),
        )
    except (BadSnapshot, BadPolicy, OSError) as exc:
        module.fail_json(msg=f"Nothing placed: {exc}")
    module.exit_json(
        changed=False,
        placements=[each.as_dict() for each in found],
        placed=all(each.to for each in found),
    )


if __name__ == "__main__":
    main()
