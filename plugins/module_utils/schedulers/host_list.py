# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The nodes of a cluster as Ansible hosts: plain data that can be kept in a cache, and the groups they are in.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Snapshot

Host = dict[str, Any]
"""``name``, ``address`` (None if the name will do) and ``facts``, all of it JSON."""

_POOLS = ("nodepool", "partition")


def hosts(snapshot: Snapshot, addresses: Mapping[str, str]) -> list[Host]:
    return [
        {
            "name": node.name,
            "address": addresses.get(node.name),
            "facts": {
                "model": node.gpu_model,
                "gpus": node.gpus,
                "driver": node.loaded,
                "domains": dict(node.domains),
                "schedulable": node.schedulable,
                "cordoned_by": node.cordoned_by,
            },
        }
        for node in snapshot.nodes
    ]


def groups(facts: Mapping[str, Any]) -> list[str]:
    """The groups of a host, not yet fit to be names of groups; ``facts`` are those of :func:`hosts` and whether it
    ``needs_upgrade``."""
    named = {"gpu_model": facts["model"], "gpu_driver": facts["driver"] or "unknown"}
    named["gpu_pool"] = next((facts["domains"][kind] for kind in _POOLS if kind in facts["domains"]), None)
    found = ["gpu_nodes", *(f"{group}_{value}" for group, value in named.items() if value)]
    if facts["cordoned_by"]:
        found.append("gpu_cordoned")
    if facts["needs_upgrade"]:
        found.append("gpu_needs_upgrade")
    return found
