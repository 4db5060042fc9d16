# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that plan: what the fleet is, and what the operator allows."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  version:
    description: Driver version to bring the nodes to, for example V(580.95.05).
    type: str
    required: true
  nodes:
    description:
      - The nodes as M(gpufleet.driver.driver_info) sees them, when no scheduler knows about workloads.
      - Give this or O(snapshot).
    type: list
    elements: dict
    suboptions:
      name:
        description: Name of the node, as in the inventory.
        type: str
        required: true
      loaded_version:
        description: Driver version the kernel has loaded.
        type: str
      installed_version:
        description: Driver version of the installed packages.
        type: str
      gpus:
        description: Model names of its GPUs, one entry a GPU.
        type: list
        elements: str
        default: []
      domain:
        description: Name of the NVLink domain the node belongs to. Nodes of one domain are upgraded in one batch.
        type: str
      skip_reason:
        description: Why the node must be left out; null if it need not be.
        type: str
      unfinished:
        description: Whether an interrupted upgrade left the node half way. Such a node comes first.
        type: bool
        default: false
  snapshot:
    description:
      - A snapshot of the fleet with its workloads, as a dictionary, or the path of a JSON file that holds one.
      - Its form is described in C(docs/snapshot.md) of this collection.
      - Give this or O(nodes).
    type: raw
  canary:
    description:
      - How many nodes of each GPU model are upgraded and judged before all others, or the names of the nodes.
      - A number takes the cheapest nodes of the most common kind that are not in O(reserve), as far as the limits below
        let them be down at once; the plan's notes say if that is fewer. V(0) is no canary.
      - Nodes left unfinished by an interrupted upgrade count as canaries. Nodes out of service come with them.
    type: raw
    default: 1
  batch_size:
    description:
      - How many nodes a batch may hold, as a number, a percentage of the nodes to upgrade, or a list of these.
      - The last entry of a list repeats, as in Ansible's C(serial). A size that is too small for the domain to upgrade
        next is passed over.
    type: raw
    default: 20%
  growth:
    description: After the last entry of O(batch_size), each batch is this many times as large as the one before it.
    type: float
    default: 1
  max_unavailable:
    description:
      - How many nodes may be out of service at once, as a number or a percentage of the nodes to upgrade.
      - Nodes out of service already count.
    type: raw
  keep_together:
    description:
      - Kinds of domain whose nodes are upgraded in one batch. An empty list allows every domain to be split.
      - A node of two domains joins them. If one of the nodes keeps its driver, the whole domain does.
    type: list
    elements: str
    default: [nvlink, imex]
  max_per_domain:
    description: How many nodes of one domain a batch may hold, by kind of domain, for example V({"rack":2}).
    type: dict
    default: {}
  reserve:
    description: Names of nodes to upgrade last. Without any, the plan chooses by what loses least.
    type: list
    elements: str
    default: []
  max_wait:
    description:
      - How long a batch may wait for work to end by itself, in seconds. It waits only where that loses least.
      - It waits for the longest save besides.
    type: float
    default: 7200
  max_pending:
    description:
      - How many GPUs the queued work of a GPU model may lack while a batch is down, by model.
      - It limits how many GPUs of that model a batch takes down.
    type: dict
    default: {}
  windows:
    description:
      - Maintenance windows. A batch starts only if it can finish inside one.
      - Each has C(start) and C(end) as C("HH:MM"), and may have C(days) (a list such as V([sat, sun])) and C(tz).
    type: list
    elements: dict
    default: []
  now:
    description:
      - When the upgrade would start, in ISO 8601 with a time zone. O(windows) need it.
      - The table of a plan then shows dates too, in the time zone of the first of O(windows), or else in the one given.
    type: str
  waive:
    description: Fields of the compatibility key that need not agree between a checkpoint and the node it goes to.
    type: list
    elements: str
    default: []
  gpu_models:
    description: Upgrade only nodes with these GPU models. An empty list is all.
    type: list
    elements: str
    default: []
  unsupported_gpu_models:
    description: GPU models that O(version) does not support; their nodes are left out.
    type: list
    elements: str
    default: []
"""
