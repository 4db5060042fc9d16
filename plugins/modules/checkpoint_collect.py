#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_collect
version_added: 1.0.0
short_description: Remove saves that have expired and that nobody waits for
description:
  - Removes saves of workloads past their expiry, and what interrupted saves left more than a day ago.
  - A save stays, whatever its age, until its work is proven to go on, here or elsewhere.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  store:
    description: Directory of saves.
    type: path
    default: /var/lib/gpufleet/store
  shared:
    description:
      - Whether other nodes use the same directory. Then only saves that this node made are removed, as each node knows
        only of its own whether they are waited for.
    type: bool
    default: false
  node:
    description: Name of this node. The host name if it is not given.
    type: str
seealso:
  - module: gpufleet.driver.checkpoint_info
  - module: gpufleet.driver.workload_checkpoint
"""

EXAMPLES = r"""
- name: Make room
  gpufleet.driver.checkpoint_collect:
    node: "{{ inventory_hostname }}"
"""

RETURN = r"""
removed:
  description: What was removed, by its name in the store.
  type: list
  elements: str
  returned: always
kept:
  description: Saves that have expired and stay, by id, with the reason.
  type: dict
  returned: always
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import garbage
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.artefact import ArtefactError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "store": {"type": "path", "default": "/var/lib/gpufleet/store"},
            "shared": {"type": "bool", "default": False},
            "node": {"type": "str"},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    node = p["node"] or os.uname().nodename
    try:
        removed, kept = garbage.collect(
            p["store"], p["state_dir"], time.time(), node, p["shared"], check=module.check_mode
        )
    except (ArtefactError, OSError) as exc:
        module.fail_json(msg=f"{node}: {exc}")
    module.exit_json(
        changed=bool(removed),
        removed=removed,
        kept=kept,
        diff={"before": "".join(f"{name}\n" for name in removed), "after": ""},
    )


if __name__ == "__main__":
    main()
