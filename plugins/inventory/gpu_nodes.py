# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: gpu_nodes
version_added: 1.0.0
short_description: GPU nodes of a Kubernetes or Slurm cluster as hosts
description:
  - Makes a host of every node with NVIDIA GPUs that the cluster knows, so that no list of hosts has to be kept besides.
  - All of them are in the group C(gpu_nodes), which the playbooks of this collection work on, and in groups by GPU
    model (C(gpu_model_...)), driver version (C(gpu_driver_...)), node pool or partition (C(gpu_pool_...)), and by
    whether somebody keeps work off them (C(gpu_cordoned)) or they still need the version in O(version)
    (C(gpu_needs_upgrade)).
  - Names of files with this inventory end in C(gpu_nodes.yml) or C(gpu_nodes.yaml).
  - What it knows of a node is in the host variable C(gpu_inventory), a dictionary with C(model), C(gpus), C(driver)
    (what the cluster says, which may be old or null), C(domains), C(schedulable), C(cordoned_by) and C(needs_upgrade).
  - For V(kubernetes), C(ansible_host) is the node's internal address.
author: gpufleet.driver contributors (@gpufleet)
requirements:
  - kubernetes (the Python package), with O(source=kubernetes)
extends_documentation_fragment:
  - constructed
  - inventory_cache
options:
  plugin:
    description: Marks the file as one for this plugin.
    type: str
    required: true
    choices: [gpufleet.driver.gpu_nodes]
  source:
    description: Where the nodes are asked for.
    type: str
    required: true
    choices: [kubernetes, slurm]
  version:
    description:
      - Driver version the nodes are to have. Those that have another one, or an unknown one, are put into the group
        C(gpu_needs_upgrade).
    type: str
  kubeconfig:
    description:
      - For O(source=kubernetes). File that says how to reach the cluster. Without it, the environment variable
        E(KUBECONFIG), the service account of the pod where this runs, or C(~/.kube/config).
    type: path
  context:
    description: For O(source=kubernetes). Context of that file to use instead of its current one.
    type: str
  domain_labels:
    description:
      - For O(source=kubernetes). Node labels that name a domain, by its kind, such as V(rack). Zone, rack, NVLink
        domain and node pool are known by the usual labels without.
    type: dict
    default: {}
  slurm_conf:
    description: For O(source=slurm). Path of C(slurm.conf), if it is not where Slurm's commands look for it.
    type: path
  slurm_bin:
    description: For O(source=slurm). Directory of Slurm's commands, if they are not in E(PATH).
    type: path
"""

EXAMPLES = r"""
# cluster.gpu_nodes.yml
plugin: gpufleet.driver.gpu_nodes
source: kubernetes
version: 580.95.05
compose:
  ansible_user: "'ops'"
keyed_groups:
  - key: gpu_inventory.domains.rack
    prefix: rack
cache: true
cache_plugin: ansible.builtin.jsonfile
cache_timeout: 300
cache_connection: ~/.cache/gpufleet-inventory
---
# slurm.gpu_nodes.yml
plugin: gpufleet.driver.gpu_nodes
source: slurm
"""

from typing import Any

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.utils.unsafe_proxy import wrap_var

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import registry
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import SchedulerError
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.host_list import Host, groups, hosts

OWN_OPTIONS = ("kubeconfig", "context", "domain_labels", "slurm_conf", "slurm_bin")
SLURM_SECONDS = 20
"""How long a silent slurmctld is waited for: every playbook, also a mere look, begins with this."""


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):
    NAME = "gpufleet.driver.gpu_nodes"

    def verify_file(self, path: str) -> bool:
        return super().verify_file(path) and path.endswith(("gpu_nodes.yml", "gpu_nodes.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        key = self.get_cache_key(path)
        use_cache = self.get_option("cache")
        found: list[Host] | None = None
        if use_cache and cache:
            found = self._cache.get(key)
        if found is None:
            found = self._ask()
            if use_cache:
                self._cache[key] = found
        for host in found:
            self._add(host)

    def _ask(self) -> list[Host]:
        known = registry.ARGUMENTS["scheduler_options"]["options"]
        options = {name: option.get("default") for name, option in known.items()}
        options.update({name: value for name in OWN_OPTIONS if (value := self.get_option(name)) is not None})
        if self.get_option("source") == "slurm":
            options["timeout"] = SLURM_SECONDS
        parameters = {"scheduler": self.get_option("source"), "scheduler_options": options}
        try:
            scheduler = registry.get(parameters, execution.run)
            return hosts(scheduler.snapshot([]), scheduler.addresses())
        except SchedulerError as exc:
            raise AnsibleParserError(f"no inventory from {parameters['scheduler']}: {exc}") from exc

    def _add(self, host: Host) -> None:
        version = self.get_option("version")
        name = self.inventory.add_host(host["name"])
        facts = {**host["facts"], "needs_upgrade": host["facts"]["driver"] != version if version else None}
        variables = {"gpu_inventory": facts, **({"ansible_host": host["address"]} if host["address"] else {})}
        for key, value in variables.items():
            self.inventory.set_variable(name, key, wrap_var(value))  # labels are no templates
        for group in groups(facts):
            self.inventory.add_child(self.inventory.add_group(self._sanitize_group_name(group)), name)
        strict = self.get_option("strict")
        self._set_composite_vars(self.get_option("compose"), variables, name, strict=strict)
        self._add_host_to_composed_groups(self.get_option("groups"), variables, name, strict=strict)
        self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, name, strict=strict)
