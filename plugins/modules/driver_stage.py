#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: driver_stage
version_added: 1.0.0
short_description: Download a driver and save the one that is installed, without disturbing anything
description:
  - Fetches every file that the transaction to O(version) needs into a directory of its own, and the files of today's
    driver beside them, each with its checksum. Installing, and going back, then need no repository and no network.
  - Files that are there already and still have their checksum are not fetched again.
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
    support: none
  idempotent:
    support: full
options:
  version:
    required: true
  update_cache:
    description: Refresh the package lists first; if that fails, those that are there are used, with a warning.
    type: bool
    default: true
seealso:
  - module: gpufleet.driver.driver_preflight
  - module: gpufleet.driver.driver_install
"""

EXAMPLES = r"""
- name: Have the new driver, and the old one, ready on every node
  gpufleet.driver.driver_stage:
    version: 580.95.05

- name: From NVIDIA's installer
  gpufleet.driver.driver_stage:
    version: 580.95.05
    source: runfile
    runfile: /srv/drivers/NVIDIA-Linux-x86_64-580.95.05.run
    runfile_checksum: "{{ checksum_of_580 }}"
"""

RETURN = r"""
directory:
  description: Where the target's files are.
  returned: success
  type: str
  sample: /var/lib/gpufleet/packages/580.95.05
files:
  description: The target's files. In check mode, those that are there already.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Package name.
      type: str
    version:
      description: Exact version.
      type: str
    file:
      description: File name in RV(directory).
      type: str
    sha256:
      description: Its checksum.
      type: str
    bytes:
      description: Its size.
      type: int
rollback_directory:
  description: Where the files of today's driver are.
  returned: success
  type: str
rollback_files:
  description: The files of today's driver, in the same form as RV(files).
  returned: success
  type: list
  elements: dict
findings:
  description: Findings of the plan and its simulation, as M(gpufleet.driver.driver_preflight) returns them.
  returned: always
  type: list
  elements: dict
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import install, options
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError


def main() -> None:
    arguments = {
        **options.ARGUMENTS,
        "version": {"type": "str", "required": True},
        "update_cache": {"type": "bool", "default": True},
    }
    module = AnsibleModule(argument_spec=arguments, supports_check_mode=True)
    try:
        source = options.source_for(module.params, execution.run)
        stale = source.update() if module.params["update_cache"] and not module.check_mode else None
        staged = install.stage(
            source,
            Journal.open(module.params["state_dir"], read_only=True),
            options.target_of(module.params),
            module.params["flavour"],
            module.params["rollback_required"],
            module.check_mode,
        )
    except install.Refused as exc:
        module.fail_json(msg=f"Not staged: {exc}", findings=[finding.as_dict() for finding in exc.findings])
    except (SourceError, JournalError) as exc:
        module.fail_json(msg=str(exc), findings=[])
    except OSError as exc:
        found = f"{exc.filename or module.params['state_dir']}: {exc.strerror}"
        module.fail_json(msg=f"{found}; nothing was installed. Mend that, then stage again", findings=[])
    if stale:
        module.warn(stale.message)
    module.exit_json(
        changed=staged.changed,
        directory=staged.target.directory,
        files=[asdict(file) for file in staged.target.files],
        rollback_directory=staged.rollback.directory,
        rollback_files=[asdict(file) for file in staged.rollback.files],
        findings=[finding.as_dict() for finding in staged.findings],
    )


if __name__ == "__main__":
    main()
