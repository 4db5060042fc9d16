#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: driver_swap
version_added: 1.0.0
short_description: Swap the driver of an empty node in one go
description:
  - Does what M(gpufleet.driver.gpu_settings), M(gpufleet.driver.gpu_services), M(gpufleet.driver.kernel_modules) and
    M(gpufleet.driver.driver_install) do one after the other - the settings of the GPUs are saved, the driver's clients
    stopped, the modules unloaded, the packages moved, the new modules loaded, settings put back and clients started.
    In one run instead of seven, because the node is out of service meanwhile.
  - First it works out the change of packages, refuses what cannot be done, and fetches what is not staged yet. Nothing
    is disturbed before that.
  - Each act is in the node's journal before it begins. A swap that was cut off is gone on with by running the same
    task again; acts that are done are not done twice.
  - Never reboots by itself and never forces anything. Where only a reboot lets go of the old driver, it ends with
    RV(reboot_required). Run the same task again after the reboot to do the rest.
  - If an act fails, those before it are not undone. O(state=previous) does that.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
  - gpufleet.driver.driver_source
attributes:
  check_mode:
    support: full
    details:
      - Nothing is stopped, so processes that hold the driver do not fail the task. Those that are not among the clients
        that would be stopped are warned of, as RV(findings) of C(modules.held).
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  version:
    description:
      - The full driver version to bring the node to, for example V(580.95.05). A branch such as V(580) is not enough.
      - Required for O(state=present); not used otherwise.
  state:
    description:
      - V(present) brings the node to O(version).
      - V(previous) brings it back to the packages that the journal remembers, if it remembers any.
      - V(current) leaves the packages alone; it loads the driver that is there and puts settings and clients back.
    type: str
    choices: [present, previous, current]
    default: present
  reboot:
    description:
      - Whether a reboot may take the place of unloading the old driver.
      - With V(auto), packages change under a driver that only a reboot can unload. With V(never), the module fails
        then, and the packages stay. With V(always), unloading is not tried.
    type: str
    choices: [auto, never, always]
    default: auto
  extra_units:
    description: As O(gpufleet.driver.gpu_services#module:extra_units).
    type: list
    elements: str
    default: []
  keep:
    description: As O(gpufleet.driver.gpu_services#module:keep).
    type: list
    elements: str
    default: []
  service_timeout:
    description: Seconds within which all clients must have stopped, and later come back.
    type: int
    default: 180
  module_timeout:
    description: Seconds that each C(rmmod) or C(modprobe) may take.
    type: float
    default: 60
  timeout:
    description: Seconds that the transaction may take, building of modules included.
    type: int
    default: 1800
seealso:
  - module: gpufleet.driver.driver_stage
  - module: gpufleet.driver.driver_validate
  - module: gpufleet.driver.host_workloads
"""

EXAMPLES = r"""
- name: Swap the driver of a node without work
  gpufleet.driver.driver_swap:
    version: 580.95.05
  register: swap

- name: Let a driver go that cannot be unloaded
  ansible.builtin.reboot:
  when: swap.reboot_required

- name: Do the rest
  gpufleet.driver.driver_swap:
    version: 580.95.05
    reboot: never
  when: swap.reboot_required

- name: Go back
  gpufleet.driver.driver_swap:
    state: previous
"""

RETURN = r"""
version:
  description: The driver version that the swap leads to; empty if packages are left alone or it is not known yet.
  returned: always
  type: str
acts:
  description: What was done, in this order. In check mode, what would be.
  returned: always
  type: list
  elements: dict
  contains:
    act:
      description: V(prepare), V(save settings), V(stop services), V(unload), V(packages), V(load), V(restore settings)
        or V(start services).
      type: str
    changed:
      description: Whether it changed anything.
      type: bool
    seconds:
      description: How long it took.
      type: float
    result:
      description: What the module that does this act alone would return.
      type: dict
failed_act:
  description: The act that failed. Those before it are in RV(acts), and are not undone.
  returned: on failure
  type: str
failed_result:
  description: What the module that does the failed act alone would return.
  returned: on failure
  type: dict
findings:
  description: What the acts found, each with what to do next.
  returned: always
  type: list
  elements: dict
reboot_required:
  description: Whether the node has to reboot before the driver works.
  returned: always
  type: bool
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution, swap
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import install, options
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import DriverSource, SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.host import (
    holders,
    kernel_modules,
    module_state,
    settings,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.host.services import Services, ServicesError, watchers
from ansible_collections.gpufleet.driver.plugins.module_utils.host.systemd import SystemdError
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError

SETTINGS_SECONDS = 60
ENDING_SECONDS = 5.0
"""How long processes that are just ending have to let go of the driver."""


@dataclass
class Packages:
    """The packages of this node, on their way to what was asked for."""

    params: Mapping[str, Any]
    journal: Journal
    node: install.Node
    check: bool
    source: DriverSource | None = None
    change: install.Change | None = None

    def prepare(self) -> swap.Prepared:
        if self.params["state"] == "current":
            return swap.Prepared()
        target = options.target_of(self.params) if self.params["state"] == "present" else None
        self.source = options.source_for(self.params, execution.run)
        change = install.prepare(
            self.source,
            self.journal,
            self.node,
            target,
            self.params["flavour"],
            rollback_required=self.params["rollback_required"],
        )
        self.change = change if self.check else install.fetch(self.source, change)
        return swap.Prepared(to=change.to, moves=change.needed)

    def move(self, loaded_allowed: bool) -> swap.Done:
        if self.source is None or self.change is None:
            return swap.Done()
        done = install.carry_out(
            self.source,
            self.journal,
            self.node,
            self.change,
            time.time,
            loaded_allowed=loaded_allowed,
            timeout=self.params["timeout"],
            check_mode=self.check,
        )
        return swap.Done(done.changed, {**done.as_dict(), "diff": done.diff()})


def of(done: module_state.Result | settings.Result) -> swap.Done:
    return swap.Done(done.changed, done.as_dict(), done.error, done.reboot_required)


def acts(params: Mapping[str, Any], journal: Journal, check: bool) -> swap.Acts:
    """The acts of a swap, bound to this node."""
    run = execution.run
    node = options.node_for(params, run)
    packages = Packages(params, journal, node, check)
    kernel = kernel_modules.KernelModules(run, timeout=params["module_timeout"])
    services = Services(journal, run, find_watchers=lambda: watchers(holders.take()))

    def census() -> holders.Census:
        return holders.Census({}, ()) if check else holders.take(run=run)

    def save() -> swap.Done:
        if params["state"] != "present":
            return swap.Done()  # the driver on its way out is not the one whose settings count
        return of(settings.save(journal, SETTINGS_SECONDS, time.time()))

    stopped: set[str] = set()

    def stop() -> swap.Done:
        done = services.stop(params["extra_units"], params["keep"], params["service_timeout"], check=check)
        stopped.update(done["stopped"], done["detached"])
        return swap.Done(done["changed"], done)

    def unload() -> swap.Done:
        done = module_state.unloaded(kernel, journal, census, wait=ENDING_SECONDS, check=check)
        if check and done.changed:
            done.findings += module_state.foreseen(holders.take(run=run), stopped)
        return of(done)

    def start() -> swap.Done:
        done = services.restore(params["service_timeout"], check=check)
        return swap.Done(done["changed"], done)

    return swap.Acts(
        prepare=packages.prepare,
        save=save,
        stop=stop,
        unload=unload,
        packages=packages.move,
        load=lambda: of(module_state.loaded(kernel, journal, check=check)),
        restore=lambda: of(settings.restore(journal, SETTINGS_SECONDS, time.time(), check=check)),
        start=start,
        loaded=node.loaded,
    )


@contextmanager
def failures(params: Mapping[str, Any]) -> Iterator[None]:
    """What goes wrong in any pillar, as a failed act."""
    try:
        yield
    except ServicesError as exc:
        raise swap.Failed(swap.Done(result=exc.result, error=str(exc))) from exc
    except install.Refused as exc:
        found = [finding.as_dict() for finding in exc.findings]
        raise swap.Failed(swap.Done(result={"findings": found}, error=str(exc))) from exc
    except (settings.SettingsError, SystemdError, SourceError, JournalError) as exc:
        raise swap.Failed(swap.Done(error=str(exc))) from exc
    except OSError as exc:
        text = f"{exc.filename or params['state_dir']}: {exc.strerror}; mend that, then run this again"
        raise swap.Failed(swap.Done(error=text)) from exc


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **options.ARGUMENTS,
            "state": {"type": "str", "choices": ["present", "previous", "current"], "default": "present"},
            "reboot": {"type": "str", "choices": [swap.AUTO, swap.NEVER, swap.ALWAYS], "default": swap.AUTO},
            "extra_units": {"type": "list", "elements": "str", "default": []},
            "keep": {"type": "list", "elements": "str", "default": []},
            "service_timeout": {"type": "int", "default": 180},
            "module_timeout": {"type": "float", "default": 60},
            "timeout": {"type": "int", "default": 1800},
        },
        required_if=[("state", "present", ["version"])],
        supports_check_mode=True,
    )
    try:
        journal = Journal.open(module.params["state_dir"], read_only=module.check_mode)
    except JournalError as exc:
        module.fail_json(msg=str(exc))
    one = swap.Swap(acts(module.params, journal, module.check_mode), module.params["reboot"], module.check_mode)
    try:
        with failures(module.params):
            reboot_required = one.run()
    except swap.Failed as exc:
        result = one.as_dict()
        result["findings"] += exc.done.result.get("findings", [])
        result["changed"] |= exc.done.result.get("changed", False)
        module.fail_json(
            msg=f"{one.act}: {exc}" + ("; nothing was disturbed" if one.act == swap.PREPARE else ""),
            failed_act=one.act,
            failed_result=dict(exc.done.result),
            reboot_required=exc.done.reboot_required,
            **result,
        )
    result = one.as_dict()
    for finding in result["findings"]:
        if finding["level"] == WARNING and finding["check"].startswith("modules."):
            module.warn(finding["message"])
    module.exit_json(reboot_required=reboot_required, **result)


if __name__ == "__main__":
    main()
