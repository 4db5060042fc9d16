#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: upgrade_plan
version_added: 1.0.0
short_description: Plan in which order and in which batches GPU nodes get a new driver
description:
  - Decides which nodes are upgraded, in which batches and in which order, and which are left out and why.
  - Runs on the controller, reads nothing but its options and changes nothing. The same options give the same plan.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.fleet
attributes:
  check_mode:
    support: full
  diff_mode:
    support: N/A
    details: This module changes nothing.
  idempotent:
    support: full
options:
  version:
    description: Driver version to bring the nodes to, for example V(580.95.05).
    type: str
    required: true
  nodes:
    description:
      - The nodes as M(gpufleet.driver.driver_info) sees them, when no scheduler knows about workloads.
      - Give this or O(snapshot).
    type: list
    elements: dict
    suboptions:
      name:
        description: Name of the node, as in the inventory.
        type: str
        required: true
      loaded_version:
        description: Driver version the kernel has loaded.
        type: str
      installed_version:
        description: Driver version of the installed packages.
        type: str
      gpus:
        description: Model names of its GPUs, one entry a GPU.
        type: list
        elements: str
        default: []
      domain:
        description: Name of the NVLink domain the node belongs to. Nodes of one domain are upgraded in one batch.
        type: str
      skip_reason:
        description: Why the node must be left out; null if it need not be.
        type: str
      unfinished:
        description: Whether an interrupted upgrade left the node half way. Such a node comes first.
        type: bool
        default: false
  snapshot:
    description:
      - A snapshot of the fleet with its workloads, as a dictionary, or the path of a JSON file that holds one.
      - Give this or O(nodes).
    type: raw
  canary:
    description:
      - How many nodes are upgraded and judged before all others, or their names.
      - Nodes left unfinished by an interrupted upgrade count as canaries.
    type: raw
    default: 1
  batch_size:
    description:
      - How many nodes a batch may hold, as a number, a percentage of the nodes to upgrade, or a list of these.
      - The last entry of a list repeats, as in Ansible's C(serial).
    type: raw
    default: 20%
  growth:
    description: After the last entry of O(batch_size), each batch is this many times as large as the one before it.
    type: float
    default: 1
  max_unavailable:
    description:
      - How many nodes may be out of service at once, as a number or a percentage of the nodes to upgrade.
      - Nodes out of service already count.
    type: raw
  keep_together:
    description: Kinds of domain whose nodes are upgraded in one batch. An empty list allows every domain to be split.
    type: list
    elements: str
    default: [nvlink, imex]
seealso:
  - module: gpufleet.driver.upgrade_gate
"""

EXAMPLES = r"""
- name: Plan for the hosts of this play
  gpufleet.driver.upgrade_plan:
    version: 580.95.05
    canary: 1
    batch_size: [1, 10%, 30%]
    nodes:
      - {name: gpu-node-01, loaded_version: 570.133.20, installed_version: 570.133.20, gpus: [NVIDIA H100 80GB HBM3]}
      - {name: gpu-node-02, loaded_version: 570.133.20, installed_version: 570.133.20, gpus: [NVIDIA H100 80GB HBM3]}
  delegate_to: localhost
  run_once: true
  register: planned

- name: Show it
  ansible.builtin.debug:
    var: planned.table
"""

RETURN = r"""
plan:
  description: The plan.
  type: dict
  returned: success
  contains:
    id:
      description: Twelve digits that stand for version and batches; two plans with one id do the same.
      type: str
    version:
      description: The driver version.
      type: str
    batches:
      description: The batches in order, each with RV(ignore:name) and RV(ignore:nodes).
      type: list
      elements: dict
    serial:
      description: The sizes of the batches, for C(serial).
      type: list
      elements: int
    order:
      description: The names of the nodes in the order of their upgrade.
      type: list
      elements: str
    skipped:
      description: The nodes left out, each with RV(ignore:node) and RV(ignore:reason).
      type: list
      elements: dict
    canary:
      description: The nodes of the first batch if it is a canary, else nothing.
      type: list
      elements: str
    notes:
      description: What a person should know before approving.
      type: list
      elements: str
table:
  description: The plan as lines of text.
  type: list
  elements: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import BadSnapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import options, table
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.plan import make
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str", "required": True},
            "nodes": {
                "type": "list",
                "elements": "dict",
                "options": {
                    "name": {"type": "str", "required": True},
                    "loaded_version": {"type": "str"},
                    "installed_version": {"type": "str"},
                    "gpus": {"type": "list", "elements": "str", "default": []},
                    "domain": {"type": "str"},
                    "skip_reason": {"type": "str"},
                    "unfinished": {"type": "bool", "default": False},
                },
            },
            "snapshot": {"type": "raw"},
            "canary": {"type": "raw", "default": 1},
            "batch_size": {"type": "raw", "default": "20%"},
            "growth": {"type": "float", "default": 1},
            "max_unavailable": {"type": "raw"},
            "keep_together": {"type": "list", "elements": "str", "default": ["nvlink", "imex"]},
        },
        mutually_exclusive=[("nodes", "snapshot")],
        required_one_of=[("nodes", "snapshot")],
        supports_check_mode=True,
    )
    try:
        plan = make(options.snapshot_of(module.params), options.policy_of(module.params))
    except (BadSnapshot, BadPolicy, OSError) as exc:
        module.fail_json(msg=f"No plan for {module.params['version']}: {exc}")
    module.exit_json(changed=False, plan=plan.as_dict(), table=table.lines(plan))


if __name__ == "__main__":
    main()
