#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_operator_driver
version_added: 1.0.0
short_description: Change the driver of nodes through the NVIDIA GPU Operator, at our pace
description:
  - Writes a driver version into the C(ClusterPolicy) or C(NVIDIADriver) of the given nodes, and has only these nodes
    get it - every other node of the same owner is held first by the operator's own label
    C(nvidia.com/gpu-driver-upgrade.skip). Then the driver pods of the given nodes are deleted, whose DaemonSet makes
    new ones. The operator's upgrade policy is neither used nor changed.
  - A node is done when its driver pod is of the newest template and ready, feature discovery or O(loaded) says that the
    version is loaded, the operator's operands are back, and its validator is ready.
  - A node must be out of service and without pods that ask for a GPU, see M(gpufleet.driver.node_cordon) and
    M(gpufleet.driver.node_evacuate). Otherwise it fails and its driver is not touched.
  - One call does many nodes and comes back after O(patience) seconds with what is still waited for. Repeat it until
    RV(waiting_nodes) is empty. It can be stopped at any moment and called again, from anywhere.
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
      - With V(staged), the image of O(version) is pulled on the nodes while they work. Nothing else is touched.
      - With V(present), the nodes get O(version).
      - With V(previous), the nodes, and no others, go back to the version that they had; see O(finished).
      - With V(settled), at the end of a run, nodes that are as their owner wants them are the operator's again, and the
        version of an owner none of whose nodes took it is written back. Nodes that are left on another version stay
        held.
    type: str
    choices: [staged, present, previous, settled]
    required: true
  nodes:
    description: Names of the nodes. Not used by O(state=settled).
    type: list
    elements: str
    default: []
  version:
    description: The driver version, in full. Required for O(state=staged) and O(state=present).
    type: str
  finished:
    description:
      - For O(state=previous). Whether nodes go back from their last upgrade if it is over as well. With V(false), only
        what a run has begun and not ended with is undone, and other nodes are left as they are.
    type: bool
    default: true
  run_id:
    description: Identifies the run in what is noted on nodes and owners.
    type: str
    default: ""
  loaded:
    description: What nodes themselves say is loaded, by name. It counts more than the labels of feature discovery.
    type: dict
    default: {}
  deadline:
    description:
      - Unix seconds, by the clock of the machine where this runs, until which nodes are waited for. After that they
        fail.
    type: float
  patience:
    description: Seconds after which the module comes back.
    type: float
    default: 30
seealso:
  - module: gpufleet.driver.gpu_operator_info
  - module: gpufleet.driver.node_cordon
  - module: gpufleet.driver.node_evacuate
"""

EXAMPLES = r"""
- name: Give the driver to the nodes of this batch
  gpufleet.driver.gpu_operator_driver:
    state: present
    nodes: "{{ ansible_play_batch }}"
    version: 580.95.05
    run_id: "{{ gpu_run_id }}"
    deadline: "{{ swap_deadline }}"
  delegate_to: localhost
  run_once: true
  register: swapped
  until: swapped.waiting_nodes | default([]) | length == 0
  retries: 100
  delay: 0
"""

RETURN = r"""
nodes:
  description: How far each node is, by name.
  type: dict
  returned: always
  sample:
    gpu-node-01:
      before: 570.133.20
      after: 580.95.05
      loaded: null
      done: false
      changed: true
      failed: false
      waiting: "its driver pod nvidia-driver-daemonset-x7k2p starts"
      msg: ""
  contains:
    before:
      description: The version of its driver pod before the run.
      type: str
    after:
      description: The version of its driver pod now.
      type: str
    loaded:
      description: The loaded version. Null if nobody has said yet.
      type: str
    done:
      description: Whether it is there.
      type: bool
    changed:
      description: Whether anything was done about it.
      type: bool
    failed:
      description: Whether waiting longer is of no use.
      type: bool
    waiting:
      description: What is waited for.
      type: str
    msg:
      description: What was found and what to do next, if it failed.
      type: str
waiting_nodes:
  description: Names of the nodes that are not there yet and have not failed.
  type: list
  elements: str
  returned: always
failed_nodes:
  description: Names of the nodes that failed.
  type: list
  elements: str
  returned: always
strayed_nodes:
  description:
    - Nodes of the same owners that were found with another driver pod out of their turn, and were taken out of service
      at once, by name, with what was found.
  type: dict
  returned: always
settled:
  description: With O(state=settled), one line for each thing done or left.
  type: list
  elements: str
  returned: always
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.gpu_operator import GpuOperator, Progress
from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import ARGUMENTS, Api, ClusterError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **ARGUMENTS,
            "state": {"type": "str", "choices": ["staged", "present", "previous", "settled"], "required": True},
            "nodes": {"type": "list", "elements": "str", "default": []},
            "version": {"type": "str"},
            "finished": {"type": "bool", "default": True},
            "run_id": {"type": "str", "default": ""},
            "loaded": {"type": "dict", "default": {}},
            "deadline": {"type": "float"},
            "patience": {"type": "float", "default": 30},
        },
        required_if=[
            ("state", "staged", ("version", "deadline")),
            ("state", "present", ("version", "deadline")),
            ("state", "previous", ("deadline",)),
        ],
        supports_check_mode=True,
    )
    p = module.params
    nodes: dict[str, Progress] = {}
    settled: list[str] = []
    try:
        api = Api(p["kubeconfig"], p["context"], p["timeout"])
        operator = GpuOperator(api, p["run_id"], p["loaded"], time.time)
        how = (p["deadline"], p["patience"], module.check_mode)
        if p["state"] == "staged":
            nodes = operator.stage(p["nodes"], p["version"], *how)
        elif p["state"] == "present":
            nodes = operator.swap(p["nodes"], p["version"], *how)
        elif p["state"] == "previous":
            nodes = operator.restore(p["nodes"], *how, finished=p["finished"])
        else:
            settled = operator.settle(module.check_mode)
    except ClusterError as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(
        changed=bool(settled) or any(its.changed for its in nodes.values()),
        nodes={name: its.as_dict() for name, its in nodes.items()},
        waiting_nodes=[name for name, its in nodes.items() if not its.done and not its.failed],
        failed_nodes=[name for name, its in nodes.items() if its.failed],
        strayed_nodes=operator.strayed,
        settled=settled,
        diff={
            "before": "".join(f"{name}: {its.before}\n" for name, its in nodes.items()),
            "after": "".join(f"{name}: {its.after}\n" for name, its in nodes.items()),
        },
    )


if __name__ == "__main__":
    main()
