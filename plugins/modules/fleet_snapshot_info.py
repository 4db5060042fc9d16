#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_snapshot_info
version_added: 1.0.0
short_description: Ask the scheduler what the fleet is and what runs on it, for the planner
description:
  - Returns the fleet at this instant in the form that M(gpufleet.driver.upgrade_plan) and
    M(gpufleet.driver.upgrade_forecast) read - nodes, the work on them, and what may be done to it.
  - What the nodes say of themselves, O(hosts), counts more than what the scheduler was told about them.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.info
  - gpufleet.driver.attributes.fleet
  - gpufleet.driver.fleet
options:
  hosts:
    description:
      - What the nodes said of themselves, as the fact C(gpu_node) that the role C(gpufleet.driver.preflight) sets. Read
        are C(name), C(loaded), C(installed), C(gpus) (the names of the models, one for each GPU), C(domain),
        C(unfinished), C(skip) (why the node is to be left out) and C(pods) (ids of pods that have a GPU open there).
      - Where it is given, a node of the scheduler that is not in it is left out of the upgrade, and so is a host that
        the scheduler does not know.
    type: list
    elements: dict
    default: []
seealso:
  - module: gpufleet.driver.upgrade_plan
  - module: gpufleet.driver.driver_info
"""

EXAMPLES = r"""
- name: What is the fleet doing?
  gpufleet.driver.fleet_snapshot_info:
    scheduler: hosts
    hosts: "{{ groups['gpu_nodes'] | map('extract', hostvars, 'gpu_node') }}"
  delegate_to: localhost
  run_once: true
  register: fleet

- name: Plan for it
  gpufleet.driver.upgrade_plan:
    version: 580.95.05
    snapshot: "{{ fleet.snapshot }}"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
snapshot:
  description: The fleet, as the option O(gpufleet.driver.upgrade_plan#module:snapshot) describes it.
  type: dict
  returned: always
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import answers, execution, fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import registry
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import SchedulerError, with_host_facts

SPEC: dict[str, Any] = {
    "argument_spec": {
        **registry.ARGUMENTS,
        "hosts": {"type": "list", "elements": "dict", "default": []},
    },
}


def answer(p: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    nameless = [host for host in p["hosts"] if not host.get("name")]
    if nameless:
        raise answers.Failed(f"an entry of hosts has no name: {nameless[0]}")
    options = p["scheduler_options"]
    options["holders"] = [*options["holders"], *(str(uid) for host in p["hosts"] for uid in host.get("pods") or ())]
    try:
        seen = registry.get(p, execution.run).snapshot([str(host["name"]) for host in p["hosts"]])
        snapshot = fleet.dump(with_host_facts(seen, p["hosts"], p["scheduler"]))
    except SchedulerError as exc:
        raise answers.Failed(str(exc)) from exc
    return {"changed": False, "snapshot": snapshot}


def main() -> None:
    answers.give(AnsibleModule(**SPEC, supports_check_mode=True), answer)


if __name__ == "__main__":
    main()
