#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_info
version_added: 1.0.0
short_description: Tell what a node can save and restore, what is saved there, and what stands still
description:
  - Tells, without changing anything, whether the ways of saving work function on this node, the node's part of the
    compatibility key, the saves in its store, and the workloads that were stopped or restored here.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes.info
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
options:
  store:
    description: Directory of saves.
    type: path
    default: /var/lib/gpufleet/store
  verify:
    description: Compare every byte of every save with its manifest.
    type: bool
    default: false
  criu:
    description: CRIU's program.
    type: str
    default: criu
  encrypt:
    description:
      - For whom saves are encrypted, each as O(gpufleet.driver.workload_checkpoint#module:workloads[].save.encrypt). It
        is tried whether this node can decrypt what is encrypted so.
    type: list
    elements: dict
    default: []
    suboptions:
      tool:
        description: Program that encrypts.
        type: str
        choices: [age, gpg]
        default: age
      recipient:
        description: For whom.
        type: str
        required: true
      identity:
        description: File with the key that decrypts, for V(age).
        type: path
      scratch:
        description: Directory for plain files while they are needed. Not used here.
        type: path
        default: /dev/shm
seealso:
  - module: gpufleet.driver.checkpoint_collect
  - module: gpufleet.driver.workload_checkpoint
  - module: gpufleet.driver.workload_restore
"""

EXAMPLES = r"""
- name: What stands still, and what is saved?
  gpufleet.driver.checkpoint_info:
    verify: true
  register: saves
"""

RETURN = r"""
backends:
  description: Each way of saving work, with its C(capabilities), whether it is C(usable) here, and what it C(lacks).
  type: dict
  returned: always
facts:
  description: The node's part of the compatibility key, by field. A fact that cannot be had is null.
  type: dict
  returned: always
gpus:
  description: The GPUs, with C(uuid), C(minor), C(total), C(used) and the C(pids) that compute on each.
  type: list
  elements: dict
  returned: always
free_bytes:
  description: Bytes free for saves.
  type: int
  returned: always
saves:
  description: Manifests of the saves in the store, without the hashes.
  type: list
  elements: dict
  returned: always
leftovers:
  description: Names in the store that are no whole saves.
  type: list
  elements: str
  returned: always
problems:
  description: Id of each save that is not what was published, with what is wrong.
  type: dict
  returned: with O(verify=true)
cannot_decrypt:
  description: For each of O(encrypt), why this node cannot decrypt it. Empty if it can.
  type: list
  elements: str
  returned: always
waited_for:
  description:
    - Saves that must stay, by id, with the reason. Their work is not yet proven to go on.
    - M(gpufleet.driver.checkpoint_collect) removes the others once they have expired.
  type: dict
  returned: always
stopped:
  description: What is remembered of workloads that were saved here. Those C(frozen) or C(published) stand still.
  type: list
  elements: dict
  returned: always
restored:
  description: What is remembered of workloads that were restored here.
  type: list
  elements: dict
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, facts, garbage, options
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.sealed import Seal
from ansible_collections.gpufleet.driver.plugins.module_utils.host import nvml


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "store": {"type": "path", "default": "/var/lib/gpufleet/store"},
            "verify": {"type": "bool", "default": False},
            "criu": {"type": "str", "default": "criu"},
            "encrypt": {"type": "list", "elements": "dict", "default": [], "options": dict(options.ENCRYPT)},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    report = nvml.observe(20)
    usage = nvml.usage(20)
    backends = {}
    for name in options.BACKENDS:
        chosen = options.backend(name, p, Limits(), module.log)
        lacks = [one.as_dict() for one in chosen.probe()]
        backends[chosen.name] = {
            "usable": not lacks,
            "lacks": lacks,
            "capabilities": chosen.capabilities.as_dict(),
        }
    saves, leftovers = artefact.listing(p["store"])
    result = {
        "backends": backends,
        "facts": facts.node_facts(report, execution.run, p["criu"]),
        "gpus": [
            {**gpu, "pids": sorted(pid for pid, one in usage.items() if index in one.gpus)}
            for index, gpu in enumerate(facts.gpu_order(report))
        ],
        "free_bytes": artefact.free_bytes(p["store"]),
        "saves": saves,
        "leftovers": leftovers,
        "cannot_decrypt": [Seal(execution.run, one).trouble_opening() for one in p["encrypt"]],
        "waited_for": garbage.needed(p["state_dir"]),
        "stopped": garbage.records(p["state_dir"], "checkpoints"),
        "restored": garbage.records(p["state_dir"], "restores"),
    }
    if p["verify"]:
        wrong = {save["id"]: artefact.verify(p["store"], save["id"]) for save in saves}
        result["problems"] = {name: found for name, found in wrong.items() if found}
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
