# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the operator decides about an upgrade: sizes of batches, limits, windows. Pure: time is an argument.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

Size = Union[int, str]
"""A number of nodes, or a percentage of the nodes that will be upgraded such as ``25%``."""


class BadPolicy(ValueError):
    """A policy that contradicts itself or the fleet; the text says what and what to change."""


@dataclass(frozen=True)
class Policy:
    """How to upgrade.

    ``canary`` is a number of nodes or their names. ``batch_size`` is one size or several; the last one repeats, as in
    Ansible's ``serial``. ``growth`` multiplies the size after each batch. ``keep_together`` names the domain kinds
    that never run two driver versions longer than their own batch takes.
    """

    version: str
    canary: int | tuple[str, ...] = 1
    batch_size: tuple[Size, ...] = ("20%",)
    growth: float = 1.0
    max_unavailable: Size | None = None
    keep_together: tuple[str, ...] = ("nvlink", "imex")


def count(size: Size, total: int, what: str) -> int:
    """Nodes that ``size`` means out of ``total``: a percentage is rounded down, but never to nothing.

    :raises BadPolicy: if it is neither a positive number nor a percentage between 1 % and 100 %.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    text = str(size).strip()
    if text.isdigit() and int(text) > 0:
        return int(text)
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s?%", text)
    if found and 0 < float(found.group(1)) <= 100:
        return max(1, int(total * float(found.group(1)) / 100))
    raise BadPolicy(f"{what} {size!r} is neither a number of nodes of 1 or more nor a percentage such as 25%")


def batch_limits(policy: Policy, total: int, unavailable: int) -> Sequence[int]:
    """The largest size of each batch after the canary; the last one repeats.

    ``unavailable`` nodes are out of service before the upgrade begins and use up ``max_unavailable``.

    :raises BadPolicy: if no node may be taken down.
    """
    most = total
    if policy.max_unavailable is not None:
        allowed = count(policy.max_unavailable, total, "max_unavailable")
        most = allowed - unavailable
        if most < 1:
            raise BadPolicy(
                f"max_unavailable allows {allowed} nodes down and {unavailable} are already out of service: "
                "return some of them to service, or raise max_unavailable"
            )
    sizes = [count(size, total, "batch_size") for size in policy.batch_size]
    if not sizes:
        raise BadPolicy("batch_size is an empty list")
    if policy.growth < 1:
        raise BadPolicy(f"growth {policy.growth} would shrink batches; give 1 or more")
    if policy.growth > 1:
        grown = float(sizes[-1])
        while grown < most:
            grown *= policy.growth
            sizes.append(int(grown))
    return [min(size, most) for size in sizes]


def canary_of(value: Any) -> int | tuple[str, ...]:
    """The ``canary`` option: a number of nodes, one name or several separated by commas, or a list of names.

    :raises BadPolicy: for anything else.
    """
    if isinstance(value, str):
        value = value.strip()
        if value.isdigit():
            return int(value)
        return tuple(name.strip() for name in value.split(",") if name.strip())
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(str(name) for name in value)
    raise BadPolicy(f"canary {value!r} is neither a number of nodes nor names of nodes")
