#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: node_maintenance
version_added: 1.0.0
short_description: Ask NVIDIA's maintenance operator for nodes, and give them back
description:
  - Takes part as a requestor in the maintenance of nodes that NVIDIA's maintenance operator hands out
    (C(NodeMaintenance), C(maintenance.nvidia.com/v1alpha1)), so that work on GPUs, network cards and kernels is done in
    one maintenance and never at the same time on more nodes than the operator allows.
  - A node that another requestor has in maintenance is joined. A request of our own asks for neither cordon nor drain.
  - One call does many nodes, and comes back after O(patience) seconds with what is still waited for. Repeat it until
    RV(waiting_nodes) is empty.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.kubernetes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  state:
    description:
      - With V(requested), the nodes are asked for and waited for. With V(released), they are given back.
    type: str
    choices: [requested, released]
    required: true
  nodes:
    description: Names of the nodes.
    type: list
    elements: str
    required: true
  namespace:
    description: Where requests are made.
    type: str
    required: true
  deadline:
    description:
      - Unix seconds, by the clock of the machine where this runs, from which on nodes that were not handed out fail.
        Required for O(state=requested).
    type: float
  patience:
    description: Seconds after which the module comes back.
    type: float
    default: 30
seealso:
  - module: gpufleet.driver.node_cordon
"""

EXAMPLES = r"""
- name: Ask for the nodes of this batch
  gpufleet.driver.node_maintenance:
    state: requested
    nodes: "{{ ansible_play_batch }}"
    namespace: nvidia-maintenance-operator
    deadline: "{{ maintenance_deadline }}"
  delegate_to: localhost
  run_once: true
  register: maintenance
  until: maintenance.waiting_nodes | default([]) | length == 0
  retries: 100
  delay: 0
"""

RETURN = r"""
nodes:
  description: How it stands with each node, by name.
  type: dict
  returned: always
  sample:
    gpu-node-01: {ready: true, changed: true, failed: false, shared: [nvidia.network-operator], waiting: "", msg: ""}
  contains:
    ready:
      description: Whether it may be worked on, or was given back.
      type: bool
    changed:
      description: Whether a request was made, joined or ended.
      type: bool
    failed:
      description: Whether waiting longer is of no use.
      type: bool
    shared:
      description: The other requestors of the same maintenance.
      type: list
      elements: str
    waiting:
      description: What is waited for.
      type: str
    msg:
      description: What was found and what to do next.
      type: str
waiting_nodes:
  description: Names of the nodes that may not be worked on yet and have not failed.
  type: list
  elements: str
  returned: always
failed_nodes:
  description: Names of the nodes that failed.
  type: list
  elements: str
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import ARGUMENTS, Api, ClusterError
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.node_maintenance import Maintenance


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **ARGUMENTS,
            "state": {"type": "str", "choices": ["requested", "released"], "required": True},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "namespace": {"type": "str", "required": True},
            "deadline": {"type": "float"},
            "patience": {"type": "float", "default": 30},
        },
        required_if=[("state", "requested", ("deadline",))],
        supports_check_mode=True,
    )
    p = module.params
    try:
        maintenance = Maintenance(Api(p["kubeconfig"], p["context"], p["timeout"]), p["namespace"])
        if p["state"] == "requested":
            nodes = maintenance.request(p["nodes"], p["deadline"], p["patience"], module.check_mode)
        else:
            nodes = maintenance.release(p["nodes"], module.check_mode)
    except ClusterError as exc:
        module.fail_json(msg=str(exc))
    changed = [name for name, its in nodes.items() if its.changed]
    asked = p["state"] == "requested"
    module.exit_json(
        changed=bool(changed),
        nodes={name: its.as_dict() for name, its in nodes.items()},
        waiting_nodes=[name for name, its in nodes.items() if not its.ready and not its.failed],
        failed_nodes=[name for name, its in nodes.items() if its.failed],
        diff={
            "before": "".join(f"{name}: {'not ' if asked else ''}in maintenance\n" for name in changed),
            "after": "".join(f"{name}: {'' if asked else 'not '}in maintenance\n" for name in changed),
        },
    )


if __name__ == "__main__":
    main()
