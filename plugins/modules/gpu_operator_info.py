#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_operator_info
version_added: 1.0.0
short_description: Tell which driver the NVIDIA GPU Operator has on each node, and whether it can go to another
description:
  - Looks at the objects of the NVIDIA GPU Operator (C(ClusterPolicy), C(NVIDIADriver), driver DaemonSets and their
    pods, node labels) and says for each node who owns its driver, which version its pod has and which is loaded.
  - Judges what would hinder an upgrade to O(version) - nodes whose driver belongs to the host, nodes that somebody
    holds, leftovers of earlier upgrades, an upgrade of the operator's own that is under way.
  - Runs where the API server can be reached, once for all nodes.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.info
  - gpufleet.driver.kubernetes
options:
  version:
    description: The driver version that nodes are to go to. Without it, nothing is said about that.
    type: str
    default: ""
  nodes:
    description: Names of the nodes to judge. Without it, every GPU node of the cluster.
    type: list
    elements: str
seealso:
  - module: gpufleet.driver.gpu_operator_driver
"""

EXAMPLES = r"""
- name: See which nodes could go to another driver
  gpufleet.driver.gpu_operator_info:
    version: 580.95.05
  delegate_to: localhost
  run_once: true
  register: drivers

- name: Show what hinders them
  ansible.builtin.debug:
    msg: "{{ drivers.nodes | dict2items | rejectattr('value.ready') | map(attribute='value.reason') | list }}"
"""

RETURN = r"""
release:
  description: Release of the GPU Operator.
  returned: success
  type: str
  sample: 25.10.1
namespace:
  description: Where the operator runs its pods.
  returned: success
  type: str
  sample: gpu-operator
findings:
  description: What was found about the operator itself, each with C(check), C(level), C(message) and C(next).
  returned: success
  type: list
  elements: dict
nodes:
  description: What was found about each node, by name.
  returned: success
  type: dict
  sample:
    gpu-node-01:
      ready: true
      already: false
      reason: ""
      owner: {kind: NVIDIADriver, name: h100}
      pod_version: 570.133.20
      loaded: 570.133.20
      gpus: [NVIDIA-H100-80GB-HBM3, NVIDIA-H100-80GB-HBM3]
      state: upgrade-done
      held: false
  contains:
    ready:
      description: Whether nothing stands in the way. Warnings do not.
      type: bool
    already:
      description: Whether its pod is of O(version) and of the newest template, ready, and that version is loaded.
      type: bool
    reason:
      description: Why it is not ready.
      type: str
    warnings:
      description: What deserves a look.
      type: list
      elements: str
    owner:
      description: The object whose version it follows, with C(kind) and C(name). Null if there is none.
      type: dict
    wanted:
      description: The version written there.
      type: str
    pod:
      description: Its driver pod. Null if there is none.
      type: str
    pod_version:
      description: The version of its driver pod.
      type: str
    in_sync:
      description: Whether that pod is of the newest template.
      type: bool
    loaded:
      description: The loaded version. Null if nobody has looked since the driver was started.
      type: str
    gpus:
      description: The model of each GPU, as feature discovery names it.
      type: list
      elements: str
    state:
      description: The operator's own upgrade state of the node.
      type: str
    held:
      description: Whether the operator's own upgrades pass it by.
      type: bool
    note:
      description: What a run of this collection has written down about it.
      type: dict
    run_id:
      description: The run of this collection that is at work on it, or was the last to be. Empty if there was none.
      type: str
    previous:
      description: The version it had before the last upgrade by this collection. Empty if there was none.
      type: str
    unfinished:
      description: Whether a run of this collection has not come to an end with it, and has to be started again.
      type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.gpu_operator import GpuOperator, judged
from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import ARGUMENTS, Api, ClusterError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **ARGUMENTS,
            "version": {"type": "str", "default": ""},
            "nodes": {"type": "list", "elements": "str"},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        operator = GpuOperator(Api(p["kubeconfig"], p["context"], p["timeout"])).look()
    except ClusterError as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(**judged(operator, p["version"], p["nodes"]))


if __name__ == "__main__":
    main()
