# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the options of the planning modules to a snapshot and a policy.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Any
from zoneinfo import ZoneInfo

from ..fleet import BadSnapshot, Node, NotJson, Snapshot, check, load, parse, read
from ..version import DriverVersion
from .compatibility import NAMES as FIELD_NAMES
from .policy import KEPT_TOGETHER, BadPolicy, Policy, Window, canary_of, whole

_YEAR = 366 * 86400.0

ARGUMENTS: dict[str, Any] = {
    "version": {"type": "str", "required": True},
    "nodes": {
        "type": "list",
        "elements": "dict",
        "options": {
            "name": {"type": "str", "required": True},
            "loaded_version": {"type": "str"},
            "installed_version": {"type": "str"},
            "gpus": {"type": "list", "elements": "str", "default": []},
            "domain": {"type": "str"},
            "skip_reason": {"type": "str"},
            "unfinished": {"type": "bool", "default": False},
        },
    },
    "snapshot": {"type": "raw"},
    "canary": {"type": "raw", "default": 1},
    "batch_size": {"type": "raw", "default": "20%"},
    "growth": {"type": "float", "default": 1},
    "max_unavailable": {"type": "raw"},
    "keep_together": {"type": "list", "elements": "str", "default": list(KEPT_TOGETHER)},
    "max_per_domain": {"type": "dict", "default": {}},
    "reserve": {"type": "list", "elements": "str", "default": []},
    "max_wait": {"type": "float", "default": 7200},
    "max_pending": {"type": "dict", "default": {}},
    "windows": {"type": "list", "elements": "dict", "default": []},
    "now": {"type": "str"},
    "waive": {"type": "list", "elements": "str", "default": []},
    "gpu_models": {"type": "list", "elements": "str", "default": []},
    "unsupported_gpu_models": {"type": "list", "elements": "str", "default": []},
}
"""The argument spec of the doc fragment ``gpufleet.driver.planning``."""


def snapshot_of(options: Mapping[str, Any]) -> Snapshot:
    """The snapshot given as ``snapshot`` (its decoded JSON or a path), or made of the hosts listed in ``nodes``.

    :raises BadSnapshot: naming the offending field; OSError if a path cannot be read.
    """
    given = options.get("snapshot")
    if given is not None:
        if isinstance(given, Mapping):
            return parse(given)
        if not isinstance(given, str) or given.lstrip()[:1] in ("", "[", "{"):
            raise BadSnapshot("snapshot", "is neither a dictionary nor the path of a file")
        return read(given)
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
    """:raises BadPolicy: naming the option that does not fit, and what would."""
    try:
        version = DriverVersion.parse(str(options["version"])).text
    except ValueError as exc:
        raise BadPolicy(str(exc)) from exc
    sizes = options["batch_size"]
    start = _moment(options["now"])
    if options["windows"] and options["now"] is None:
        raise BadPolicy("windows are given and now is not: say when the upgrade would start")
    return Policy(
        version=version,
        canary=canary_of(options["canary"]),
        batch_size=tuple(sizes) if isinstance(sizes, (list, tuple)) else (sizes,),
        growth=options["growth"],
        max_unavailable=options["max_unavailable"],
        keep_together=tuple(options["keep_together"]),
        max_per_domain=tuple(
            (kind, _positive(f"max_per_domain.{kind}", n)) for kind, n in options["max_per_domain"].items()
        ),
        reserve=tuple(name for name in options["reserve"] if name),
        max_wait=_amount("max_wait", options["max_wait"], _YEAR),
        max_pending=tuple((model, _amount(f"max_pending.{model}", n)) for model, n in options["max_pending"].items()),
        windows=tuple(Window.of(window) for window in options["windows"]),
        now=start.timestamp() if start else None,
        waive=_waived(options["waive"]),
        gpu_models=tuple(options["gpu_models"]),
        unsupported=tuple(options["unsupported_gpu_models"]),
    )


def start_of(options: Mapping[str, Any]) -> datetime | None:
    """When the upgrade would start, in the time zone of the (first) window or else as it was given; None if it was not.

    :raises BadPolicy: if it is no time.
    """
    start = _moment(options["now"])
    windows = options["windows"]
    return start.astimezone(ZoneInfo(Window.of(windows[0]).tz)) if start and windows else start


def earlier_of(value: Any) -> Mapping[str, Any] | None:
    """An earlier plan given as a dictionary or a path; a file may also hold the whole result of ``upgrade_plan``.

    :raises BadPolicy: if it is not JSON or no object; OSError if a path cannot be read.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        try:
            value = load(str(value))
        except NotJson as exc:
            raise BadPolicy(f"{value} {exc}") from exc
    if not isinstance(value, Mapping):
        raise BadPolicy("the earlier plan is not an object")
    inner = value.get("plan", value)
    return inner if isinstance(inner, Mapping) else value


def _positive(what: str, value: Any) -> int:
    if isinstance(value, bool) or whole(str(value)) is None or int(value) < 1:
        raise BadPolicy(f"{what} {value!r} is not a number of nodes of 1 or more")
    return int(value)


def _amount(what: str, value: Any, below: float = inf) -> float:
    try:
        amount = float(value)
    except (TypeError, ValueError):
        amount = -1.0
    if not 0 <= amount < below:
        raise BadPolicy(f"{what} {value!r} is not a number of 0 or more{f', below {below:.0f}' if below < inf else ''}")
    return amount


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError as exc:
        raise BadPolicy(f"now {text!r} is not a time such as 2026-03-01T22:00:00+01:00") from exc
    if moment.tzinfo is None:
        raise BadPolicy(f"now {text!r} has no time zone: append Z for UTC")
    if not 1970 < moment.year < 9000:
        raise BadPolicy(f"now {text!r} is a time for which no window can be found")
    return moment


def _waived(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in FIELD_NAMES:
            raise BadPolicy(
                f"waive names {name!r}, which is no field of the compatibility key: {', '.join(sorted(FIELD_NAMES))}"
            )
    return tuple(names)
