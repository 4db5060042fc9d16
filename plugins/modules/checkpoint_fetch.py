#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_fetch
version_added: 1.0.0
short_description: Bring a saved workload from another node to this one
description:
  - Copies an artefact of M(gpufleet.driver.workload_checkpoint) from O(source) into the store of the node the task runs
    on. The bytes go through the controller, piece by piece, over the connections that Ansible has to both nodes, so the
    nodes need no access to each other. An interrupted copy goes on where it stopped.
  - It becomes an artefact here only after every piece has been compared with the manifest.
  - Not needed where the store is a directory that both nodes share.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
attributes:
  check_mode:
    support: full
    details: Reads the manifest on O(source), and says whether it would be copied.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  artefact:
    description: Its id, as M(gpufleet.driver.workload_checkpoint) returned it.
    type: str
    required: true
  source:
    description: Name of the node it was saved on, as the inventory has it.
    type: str
    required: true
  store:
    description: Directory of saves on this node.
    type: path
    default: /var/lib/gpufleet/store
  source_store:
    description: Directory of saves on O(source), if it is another.
    type: path
  manifest:
    description: Used between the two halves of this action; not to be given.
    type: str
  finish:
    description: Used between the two halves of this action; not to be given.
    type: bool
    default: false
seealso:
  - module: gpufleet.driver.workload_checkpoint
  - module: gpufleet.driver.workload_restore
"""

EXAMPLES = r"""
- name: Bring the save of node1 to node2
  gpufleet.driver.checkpoint_fetch:
    artefact: "{{ saved.workloads[0].artefact }}"
    source: node1
  delegate_to: node2
"""

RETURN = r"""
missing:
  description: Pieces that were still to be copied, each as path and index.
  type: list
  elements: list
  returned: success
staged:
  description: Where it was put together.
  type: str
  returned: success
total:
  description: Bytes of the artefact.
  type: int
  returned: success
moved_pieces:
  description: How many pieces were copied this time.
  type: int
  returned: success
lost:
  description: Whether the failure was a lost connection to one of the nodes.
  type: bool
  returned: failure
"""

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "artefact": {"type": "str", "required": True},
            "source": {"type": "str", "required": True},
            "store": {"type": "path", "default": "/var/lib/gpufleet/store"},
            "source_store": {"type": "path"},
            "manifest": {"type": "str", "no_log": True},
            "finish": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    p = module.params
    if not p["manifest"]:
        module.fail_json(msg="this module works together with its action plugin; call it by its full name from a play")
    missing: list[tuple[str, int]] = []
    try:
        manifest = json.loads(p["manifest"])
        if not isinstance(manifest, dict) or manifest.get("id") != p["artefact"]:
            module.fail_json(msg=f"{p['source']} sent the manifest of another save than {p['artefact']}")
        if module.check_mode:
            changed = not artefact.place(p["store"], p["artefact"]).exists()
        elif p["finish"]:
            changed = artefact.accept(p["store"], manifest)
        else:
            changed, missing = False, artefact.receive(p["store"], manifest)
    except ValueError as exc:
        module.fail_json(msg=f"the manifest of {p['artefact']} on {p['source']} is damaged: {exc}")
    except artefact.ArtefactError as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(
        changed=changed,
        missing=[list(piece) for piece in missing],
        staged=str(Path(p["store"], f"{artefact.STAGED}{p['artefact']}")),
        total=manifest["total"],
    )


if __name__ == "__main__":
    main()
