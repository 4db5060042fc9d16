#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_services
version_added: 1.0.0
short_description: Stop the services that hold the NVIDIA driver, and put them back
description:
  - Stops the platform's services that keep the driver open (persistence daemon, Fabric Manager, DCGM and its
    exporters, MPS, NVSM and others) so that the kernel modules can be unloaded, and later starts exactly those that
    were running.
  - What was running, and whether it was enabled, is written to the node's journal before anything is touched. A
    service that was stopped before stays stopped.
  - While they are stopped, a drop-in with a condition below C(/run/systemd/system) keeps them from being started by a
    socket, a timer, udev, a package's script or a person. It ends with O(state=restored) or with a reboot.
  - Running units that systemd stops together with these, because they require them, are treated alike.
  - So are services that nobody named and that are found to hold GPUs without computing on them, for example an agent
    that keeps NVML open.
  - DCGM 4.5 or later stays up and detaches from driver 590 or later instead.
  - An MPS control daemon that no unit runs is told to quit by its pipe, and started again as it was.
  - Monitoring in containers is left to M(gpufleet.driver.host_workloads). A stopped service proves nothing about the
    driver being free. M(gpufleet.driver.kernel_modules) looks at who really holds it.
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
  state:
    description:
      - V(stopped) stops them and keeps them stopped.
      - V(restored) lets them go and starts those that were running.
    type: str
    choices: [stopped, restored]
    required: true
  extra_units:
    description:
      - More systemd units to stop, for example an agent that keeps NVML open. They need not exist. C(.service) may be
        left out.
    type: list
    elements: str
    default: []
  keep:
    description: Units to leave alone, although they are known to hold the driver.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds within which all of them must have stopped or come back.
    type: int
    default: 180
seealso:
  - module: gpufleet.driver.kernel_modules
  - module: gpufleet.driver.gpu_settings
  - module: gpufleet.driver.host_workloads
"""

EXAMPLES = r"""
- name: Stop what holds the driver
  gpufleet.driver.gpu_services:
    state: stopped
    extra_units: [nomad.service]

- name: Start what was running
  gpufleet.driver.gpu_services:
    state: restored
"""

RETURN = r"""
stopped:
  description: Units that were running and were stopped, in that order.
  type: list
  elements: str
  returned: with O(state=stopped)
detached:
  description: DCGM's unit, if it stays up with the driver detached.
  type: list
  elements: str
  returned: with O(state=stopped)
kept:
  description: Units of O(keep) that exist.
  type: list
  elements: str
  returned: with O(state=stopped)
started:
  description: Units that were started, in that order.
  type: list
  elements: str
  returned: with O(state=restored)
attached:
  description: DCGM's unit, if the driver was attached to it again.
  type: list
  elements: str
  returned: with O(state=restored)
left_stopped:
  description: Units that exist and were not running before the upgrade, and so were not started.
  type: list
  elements: str
  returned: with O(state=restored)
failed_units:
  description: Units that did not come back. The module fails if there is one.
  type: list
  elements: str
  returned: with O(state=restored)
mps:
  description: Pipe directories of the MPS control daemons that were told to quit, or were started.
  type: list
  elements: str
  returned: always
services:
  description: State of every unit concerned that exists, after this task, or foretold in check mode.
  type: dict
  returned: always
  sample:
    nvidia-persistenced.service: inactive
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders
from ansible_collections.gpufleet.driver.plugins.module_utils.host.services import (
    Services,
    ServicesError,
    watchers,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.host.systemd import SystemdError
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["stopped", "restored"], "required": True},
            "extra_units": {"type": "list", "elements": "str", "default": []},
            "keep": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 180},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        journal = Journal.open(p["state_dir"], read_only=module.check_mode)
        services = Services(journal, execution.run, find_watchers=lambda: watchers(holders.take()))
        if p["state"] == "stopped":
            result = services.stop(p["extra_units"], p["keep"], p["timeout"], check=module.check_mode)
        else:
            result = services.restore(p["timeout"], check=module.check_mode)
    except ServicesError as exc:
        module.fail_json(msg=str(exc), **exc.result)
    except (SystemdError, JournalError) as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
