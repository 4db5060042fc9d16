# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The compatibility key: what must agree before a checkpoint taken in one place is restored in another.

A *hard* field cannot be waived without losing the restore (or its vendor's promise); a *policy* field is this project's
own caution. Both kinds count unless the operator waives them by name, and a value that is unknown on either side counts
as different. Facts describe a node (driver, kernel, GPU …) or the workload itself (engine, image …); a workload carries
the latter with it, so only node facts are compared with a candidate node.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Callable

from ..fleet import Facts, Node

HARD, POLICY = "hard", "policy"
NODE, WORKLOAD = "node", "workload"
SCHEMA = 1


def _equal(source: Any, target: Any) -> bool:
    return bool(source == target)


def _at_least(source: Any, target: Any) -> bool:
    return isinstance(source, (int, float)) and isinstance(target, (int, float)) and target >= source


def _superset(source: Any, target: Any) -> bool:
    return isinstance(source, tuple) and isinstance(target, tuple) and set(source) <= set(target)


def _off(source: Any, target: Any) -> bool:
    return bool(source == "off" and target == "off")


@dataclass(frozen=True)
class Field:
    """One field of the key: ``agree(source, target)`` decides, ``expects`` says in words what is wanted."""

    name: str
    kind: str
    scope: str
    agree: Callable[[Any, Any], bool] = _equal
    expects: str = "the same"


FIELDS = (
    Field("gpu_model", HARD, NODE),
    Field("gpu_memory", HARD, NODE, _at_least, "at least"),
    Field("driver", HARD, NODE),
    Field("mig", HARD, NODE, _off, "off on both sides, as"),
    Field("mps", HARD, NODE, _off, "off on both sides, as"),
    Field("architecture", HARD, NODE),
    Field("cpu_features", HARD, NODE, _superset, "all of"),
    Field("kernel", HARD, NODE),
    Field("runtime", HARD, NODE),
    Field("cgroup", HARD, NODE),
    Field("security_module", HARD, NODE),
    Field("driver_flavour", POLICY, NODE),
    Field("gpu_sku", POLICY, NODE),
    Field("ecc", POLICY, NODE),
    Field("topology", POLICY, NODE),
    Field("criu", POLICY, NODE),
    Field("image", HARD, WORKLOAD),
    Field("backend", HARD, WORKLOAD),
    Field("engine", POLICY, WORKLOAD),
    Field("engine_version", POLICY, WORKLOAD),
    Field("model", POLICY, WORKLOAD),
    Field("model_revision", POLICY, WORKLOAD),
    Field("arguments", POLICY, WORKLOAD),
)
NAMES = frozenset(each.name for each in FIELDS)

NOT_TOLD_OF = NAMES - {"gpu_model", "driver"}
"""What is not looked at for a Slurm job, which saves itself in a form of its own, and for work of a plain host: the
machine it goes to is asked then. Both are promised the GPU model they had, and nobody tells more."""

OWN_SAVES = frozenset(("hook", "slurm"))
"""Backends whose saves the application itself wrote and reads again."""

SURVIVED = frozenset(("driver", "driver_flavour"))
"""What may differ where such a save is loaded: it holds nothing of the driver's."""


def saves_itself(backends: Collection[str]) -> bool:
    """Whether what is saved with one of these may go on with another driver."""
    return not OWN_SAVES.isdisjoint(backends)


def not_compared(backends: Collection[str]) -> frozenset[str]:
    """The fields of the key that do not matter to what is saved with one of these backends."""
    told = NOT_TOLD_OF if tuple(backends) in (("slurm",), ("host",)) else frozenset()
    return told | SURVIVED if saves_itself(backends) else told


@dataclass(frozen=True)
class Mismatch:
    """A field that does not agree, with both values; None stands for unknown."""

    field: str
    kind: str
    source: Any
    target: Any
    expects: str

    def __str__(self) -> str:
        wanted, found = (("unknown" if v is None else _short(v)) for v in (self.source, self.target))
        return f"key_mismatch:{self.field} wants {self.expects} {wanted}, found {found}"


def _short(value: Any) -> str:
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def explain(
    source: Mapping[str, Any] | Facts,
    target: Mapping[str, Any] | Facts,
    *,
    waived: Collection[str] = (),
    scope: str | None = None,
) -> tuple[Mismatch, ...]:
    """Every field that keeps what was saved under ``source`` from running under ``target``, hard fields first.

    :param waived: names of fields that are not compared.
    :param scope: compare only the fields of this scope (``node`` or ``workload``).
    """
    have, offer = dict(source), dict(target)
    found = []
    for each in FIELDS:
        if each.name in waived or scope not in (None, each.scope):
            continue
        wanted, offered = have.get(each.name), offer.get(each.name)
        if wanted is None or offered is None or not each.agree(wanted, offered):
            found.append(Mismatch(each.name, each.kind, wanted, offered, each.expects))
    return tuple(sorted(found, key=lambda mismatch: mismatch.kind != HARD))


def offered(node: Node) -> Facts:
    """The facts of a node, with its GPU model and loaded driver."""
    facts = dict(node.facts)
    facts.setdefault("gpu_model", node.gpu_model)
    facts["driver"] = node.loaded
    return tuple(sorted(facts.items()))


def key_of(workload_facts: Facts, node_facts: Facts) -> Facts:
    """The key of a checkpoint taken now: the facts of the node it is taken on, overridden by the workload's own."""
    return tuple(sorted({**dict(node_facts), **dict(workload_facts)}.items()))


def key_id(facts: Facts) -> str:
    """SHA-256 over the canonical JSON of a key and the number of this schema."""
    text = json.dumps({"schema": SCHEMA, **dict(facts)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
