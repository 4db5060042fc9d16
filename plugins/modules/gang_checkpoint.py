#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gang_checkpoint
version_added: 1.0.0
short_description: Save work that runs on several nodes, all of it or none
description:
  - Saves all members of a gang with M(gpufleet.driver.workload_checkpoint), each on its own node.
  - All are checked before any is stopped. If one cannot be saved, or its node does not answer, those that were saved go
    on and the task fails.
  - The nodes are dealt with one after the other, so the first stands still for longest.
  - Afterwards M(gpufleet.driver.workload_checkpoint) ends the members, or lets them go on. If nobody does, the timer on
    each node lets its members go on.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.checkpoint.store
  - gpufleet.driver.checkpoint.limits
  - gpufleet.driver.node
attributes:
  check_mode:
    support: full
    details: Checks all members. Nothing is stopped.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  members:
    description: The members. The task may run on any host, once.
    type: list
    elements: dict
    required: true
    suboptions:
      node:
        description: Name of the node in the inventory.
        type: str
        required: true
      workload:
        description: The workload, as O(gpufleet.driver.workload_checkpoint#module:workloads) takes it.
        type: dict
        required: true
seealso:
  - module: gpufleet.driver.workload_checkpoint
"""

EXAMPLES = r"""
- name: Save both halves of the simulation
  gpufleet.driver.gang_checkpoint:
    members:
      - node: node1
        workload: {name: left, unit: left.service}
      - node: node2
        workload: {name: right, unit: right.service}
  run_once: true
"""

RETURN = r"""
workloads:
  description: What became of each member, as M(gpufleet.driver.workload_checkpoint) returns it, with its C(node).
  type: list
  elements: dict
  returned: always
"""
