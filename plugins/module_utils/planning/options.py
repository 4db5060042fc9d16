# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the options of the planning modules to a snapshot and a policy.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fleet import BadSnapshot, Node, Snapshot, check, parse, read
from ..version import DriverVersion
from .policy import BadPolicy, Policy, canary_of


def snapshot_of(options: Mapping[str, Any]) -> Snapshot:
    """The snapshot given as ``snapshot`` (its decoded JSON or a path), or made of the hosts listed in ``nodes``.

    :raises BadSnapshot: naming the offending field; OSError if a path cannot be read.
    """
    given = options.get("snapshot")
    if given is not None:
        return parse(given) if isinstance(given, Mapping) else read(str(given))
    snapshot = Snapshot(nodes=tuple(_plain_node(item, index) for index, item in enumerate(options["nodes"])))
    check(snapshot)
    return snapshot


def _plain_node(item: Mapping[str, Any], index: int) -> Node:
    models = [str(model) for model in item["gpus"] or ()]
    if not item["name"]:
        raise BadSnapshot(f"nodes[{index}].name", "is empty")
    return Node(
        name=item["name"],
        gpu_model=" + ".join(sorted(set(models))) or None,
        gpus=len(models),
        loaded=item.get("loaded_version") or None,
        installed=item.get("installed_version") or None,
        domains={"nvlink": item["domain"]} if item.get("domain") else {},
        skip=item.get("skip_reason") or None,
        unfinished=bool(item.get("unfinished")),
    )


def policy_of(options: Mapping[str, Any]) -> Policy:
    """:raises BadPolicy: if the version is not one, or a size is neither a number nor a percentage."""
    try:
        version = DriverVersion.parse(str(options["version"])).text
    except ValueError as exc:
        raise BadPolicy(str(exc)) from exc
    sizes = options["batch_size"]
    return Policy(
        version=version,
        canary=canary_of(options["canary"]),
        batch_size=tuple(sizes) if isinstance(sizes, (list, tuple)) else (sizes,),
        growth=options["growth"],
        max_unavailable=options["max_unavailable"],
        keep_together=tuple(options["keep_together"]),
    )
