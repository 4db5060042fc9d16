#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: driver_install
version_added: 1.0.0
short_description: Move a node's whole driver to a version, or put the previous one back
description:
  - The complete set of driver packages moves in one transaction, with exact versions, from staged files, after a
    simulation. What is not staged yet is fetched first.
  - The exact builds, holds and streams of before are in the node's journal before anything changes;
    O(state=previous) puts exactly those back.
  - Judged by its end state - every driver package at O(version), and the module that C(modprobe) would load of the
    same version - before anything is loaded.
  - A run that was killed in the middle is gone on with by running the same task again.
  - Automatic upgrades stand still meanwhile; one that has begun is waited for.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
  - gpufleet.driver.driver_source
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  version:
    description:
      - The full driver version to bring the node to, for example V(580.95.05). A branch such as V(580) is not enough.
      - Required for O(state=present); not used by O(state=previous).
  state:
    description:
      - V(present) brings the node to O(version).
      - V(previous) puts back what the journal remembers. Where it remembers nothing, nothing was changed, and nothing
        is done.
    type: str
    choices: [present, previous]
    default: present
  loaded:
    description:
      - What to do while an nvidia module of another version is loaded. With V(allow) packages change under it - NVML
        fails until the module is reloaded or the node reboots, see RV(reboot_required).
    type: str
    choices: [refuse, allow]
    default: refuse
  hold:
    description:
      - V(as_before) holds the packages that take the place of held ones.
      - V(all) holds the complete target set, so that no automatic upgrade splits it. Later runs need O(release_holds).
    type: str
    choices: [as_before, all]
    default: as_before
  timeout:
    description: Seconds that the transaction may take, building of modules included.
    type: int
    default: 1800
seealso:
  - module: gpufleet.driver.driver_stage
  - module: gpufleet.driver.kernel_modules
"""

EXAMPLES = r"""
- name: Put the new driver in place of the unloaded old one
  gpufleet.driver.driver_install:
    version: 580.95.05
  register: installed

- name: Change it under the loaded module, and reboot into it
  gpufleet.driver.driver_install:
    version: 580.95.05
    loaded: allow
  notify: Reboot

- name: Go back
  gpufleet.driver.driver_install:
    state: previous
"""

RETURN = r"""
version:
  description: The version that is, or in check mode would be, installed.
  returned: success
  type: str
before:
  description: Driver packages and their exact versions before.
  returned: success
  type: dict
  sample: {nvidia-utils-550-server: 550.90.07-0ubuntu0.22.04.1}
after:
  description: Driver packages and their exact versions after.
  returned: success
  type: dict
disk_module_version:
  description: Version of the nvidia module that C(modprobe) would load under the running kernel.
  returned: success
  type: str
reboot_required:
  description: Whether the node has to reboot, or the module has to be reloaded, before the driver works.
  returned: success
  type: bool
reboot_reasons:
  description: Why.
  returned: success
  type: list
  elements: str
findings:
  description: Findings of the plan and its simulation, as M(gpufleet.driver.driver_preflight) returns them.
  returned: always
  type: list
  elements: dict
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import install, options
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError


def main() -> None:
    arguments = {
        **options.ARGUMENTS,
        "state": {"type": "str", "choices": ["present", "previous"], "default": "present"},
        "loaded": {"type": "str", "choices": ["refuse", "allow"], "default": "refuse"},
        "hold": {"type": "str", "choices": ["as_before", "all"], "default": "as_before"},
        "timeout": {"type": "int", "default": 1800},
    }
    module = AnsibleModule(
        argument_spec=arguments, required_if=[("state", "present", ["version"])], supports_check_mode=True
    )
    try:
        done = install.bring(
            options.source_for(module.params, execution.run),
            Journal.open(module.params["state_dir"], read_only=module.check_mode),
            options.node_for(module.params, execution.run),
            options.target_of(module.params) if module.params["state"] == "present" else None,
            module.params["flavour"],
            time.time,
            loaded_allowed=module.params["loaded"] == "allow",
            rollback_required=module.params["rollback_required"],
            timeout=module.params["timeout"],
            check_mode=module.check_mode,
        )
    except install.Refused as exc:
        module.fail_json(msg=f"Nothing was changed: {exc}", findings=[finding.as_dict() for finding in exc.findings])
    except (SourceError, JournalError) as exc:
        module.fail_json(msg=str(exc), findings=[])
    except OSError as exc:
        found = f"{exc.filename or module.params['state_dir']}: {exc.strerror}"
        module.fail_json(msg=f"{found}; mend that, then run this again: it goes on where it stopped", findings=[])
    module.exit_json(**done.as_dict(), **({"diff": done.diff()} if module._diff else {}))


if __name__ == "__main__":
    main()
