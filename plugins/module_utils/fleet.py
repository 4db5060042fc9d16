# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The words of the planner as immutable values, and their versioned JSON form: the *snapshot* of a fleet.

A snapshot is what a scheduler and the hosts said at one instant; the planner reads nothing else. Units: seconds, whole
GPUs, CPU in thousandths of a core, memory in bytes. docs/snapshot.md describes every field.

Private to this collection: may change in any release.
"""

# isinstance(True, int) holds, but a snapshot with a truth value for a number is wrong: exact types are compared.
# pylint: disable=unidiomatic-typecheck

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable

FORMAT = "gpufleet.snapshot"
VERSION = 1

MOVE, WAIT, RESTART, PROTECT = "move", "wait", "restart", "protect"
PERMISSIONS = frozenset((MOVE, WAIT, RESTART, PROTECT))

_MIG = re.compile(r"mig-[1-9][0-9]?g\.")

_TOO_MUCH = 1 << 60
"""No fleet has so many bytes or seconds of anything, and sums of such numbers are not exact."""

_SLOTS: Any = {"slots": True} if sys.version_info >= (3, 10) else {}
"""A fleet has many of these: keep them small where Python can."""

Resources = Mapping[str, int]
"""Amounts by name: ``gpu`` (whole GPUs), ``mig-<profile>`` (instances), ``cpu`` (millicores), ``memory`` (bytes)."""

Facts = tuple[tuple[str, Any], ...]
"""Compatibility facts, sorted by field name; equal facts of one snapshot are one object."""


class BadSnapshot(ValueError):
    """A snapshot that cannot be planned with; ``path`` leads to the offending field, as in ``nodes[3].gpus``."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


@dataclass(frozen=True, **_SLOTS)
class Node:
    """A machine with GPUs.

    ``free`` is what the scheduler could still give to new work. ``cordoned_by`` names who keeps work away (None if
    nobody does). ``domains`` maps a kind (``rack``, ``zone``, ``nvlink``, ``imex``, ``nodepool``, ``partition``) to
    the domain's name. ``facts`` are further compatibility facts the node offers; driver and GPU model are added.
    ``unfinished`` marks a node that an interrupted upgrade left half way.
    """

    name: str
    gpu_model: str | None = None
    gpus: int = 0
    loaded: str | None = None
    installed: str | None = None
    free: Resources = field(default_factory=dict)
    schedulable: bool = True
    cordoned_by: str | None = None
    domains: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()
    facts: Facts = ()
    skip: str | None = None
    unfinished: bool = False


@dataclass(frozen=True, **_SLOTS)
class Member:
    """The part of a workload that sits on one node, with the resources it holds there."""

    node: str
    resources: Resources


@dataclass(frozen=True, **_SLOTS)
class Workload:
    """What must survive: a pod or a gang of pods, a job, a unit, a container, a process tree.

    ``may`` says what may be done to it. ``remaining`` is the time it still needs (None: unknown, or it never ends).
    ``at_risk`` is the progress a cold start loses and ``start_cost`` the time from start to useful work, both in
    seconds. ``capture`` and ``restore`` are measured or estimated by its backend. ``requires`` maps a node label to
    the values allowed. ``together`` names a domain kind that all members must share; ``spread`` one they should not.
    ``stays_home`` is work that only starts again where it is (a unit of that machine); it is started on the node
    ``stand_in`` meanwhile, which is not upgraded at the same time.
    """

    name: str
    members: tuple[Member, ...]
    kind: str = "process"
    owner: str | None = None
    gang: bool = True
    may: frozenset[str] = frozenset((WAIT, RESTART))
    backends: tuple[str, ...] = ()
    facts: Facts = ()
    remaining: float | None = None
    at_risk: float = 0.0
    start_cost: float = 60.0
    capture: float = 60.0
    restore: float = 60.0
    priority: int = 0
    budgets: tuple[str, ...] = ()
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tolerates: tuple[str, ...] = ()
    together: str | None = None
    spread: str | None = None
    stays_home: bool = False
    stand_in: str | None = None

    @property
    def gpus(self) -> float:
        """GPUs it keeps busy; a MIG instance counts as its share of compute slices (``mig-2g.20gb`` is 2/7)."""
        return sum(gpus_of(member.resources) for member in self.members)


@dataclass(frozen=True)
class Durations:
    """Measured times in seconds: emptying a batch, installing and validating on an empty node, rebooting if needed."""

    evacuate: float = 180.0
    install: float = 420.0
    validate: float = 60.0
    reboot: float = 0.0

    @property
    def swap(self) -> float:
        return self.install + self.validate + self.reboot


@dataclass(frozen=True)
class Demand:
    """Work of one GPU model that waits in the queue: its GPUs, GPUs that arrive in an hour, and how long it runs.

    With a ``duration`` (mean seconds), queued work takes the GPUs that become free; 0 is unknown: they stay free.
    ``shortest`` is what the short ones among it take, those that fill a gap; 0 is unknown: as long as the mean.
    """

    gpus: float = 0.0
    arrivals_per_hour: float = 0.0
    duration: float = 0.0
    shortest: float = 0.0

    def and_also(self, other: Demand) -> Demand:
        """Both, as one queue."""
        total = self.gpus + other.gpus
        mean = (self.duration * self.gpus + other.duration * other.gpus) / total if total else 0.0
        short = min((each for each in (self.shortest, other.shortest) if each), default=0.0)
        return Demand(total, self.arrivals_per_hour + other.arrivals_per_hour, mean, short)


@dataclass(frozen=True)
class Snapshot:
    nodes: tuple[Node, ...]
    workloads: tuple[Workload, ...] = ()
    taken_at: str | None = None
    budgets: Mapping[str, int] = field(default_factory=dict)
    durations: Durations = field(default_factory=Durations)
    queue: Mapping[str, Demand] = field(default_factory=dict)


def gpus_of(resources: Resources) -> float:
    """GPUs in a resource vector, MIG instances by their compute slices out of seven."""
    total: float = resources.get("gpu", 0)
    for name, amount in resources.items():
        if name.startswith("mig-"):
            total += amount * int(name[4:].split("g", 1)[0]) / 7
    return total


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: it would look at many objects again and again, and all of them live on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read(path: str) -> Snapshot:
    """Read a snapshot file.

    :raises BadSnapshot: if it is not JSON of the expected form; OSError if it cannot be read.
    """
    try:
        return parse(load(path))
    except NotJson as exc:
        raise BadSnapshot(path, str(exc)) from exc


class NotJson(ValueError):
    """A file that cannot be read as JSON; the text says why."""


def load(path: str) -> Any:
    """Decoded JSON of a file, with or without a byte order mark.

    :raises NotJson: if it is none, or no plain file; OSError if it cannot be read.
    """
    if Path(path).exists() and not Path(path).is_file():  # a pipe or a device may have no end
        raise NotJson("is no plain file")
    with open(path, encoding="utf-8-sig") as stream:
        try:
            return json.load(stream)
        except (ValueError, RecursionError) as exc:
            raise NotJson(f"is not JSON: {exc}") from exc


@uncollected()
def parse(data: Any) -> Snapshot:
    """The snapshot that decoded JSON stands for.

    :raises BadSnapshot: with the path of the first field that is missing, unknown, of the wrong type or contradictory.
    """
    table = _fields(data, "snapshot", SNAPSHOT_FIELDS)
    if table.pop("format", FORMAT) != FORMAT:
        raise BadSnapshot("format", f"expected {FORMAT!r}")
    if table.pop("version", None) != VERSION:
        raise BadSnapshot("version", f"expected {VERSION}; this is the only form this release reads")
    keys = table.pop("keys", {})
    interned: dict[Facts, Facts] = {}
    names = {name: _facts(value, interned, f"keys.{name}") for name, value in keys.items()}
    nodes = tuple(
        _made(Node, NODE_FIELDS, item, "nodes", index, names, interned) for index, item in enumerate(table["nodes"])
    )
    workloads = tuple(
        _made(Workload, WORKLOAD_FIELDS, item, "workloads", index, names, interned)
        for index, item in enumerate(table.get("workloads", ()))
    )
    snapshot = Snapshot(**{**table, "nodes": nodes, "workloads": workloads})
    check(snapshot)
    return snapshot


def check(snapshot: Snapshot) -> None:
    """Refuse names used twice and references to things that are not there.

    :raises BadSnapshot: with the path of the offending field.
    """
    known = _unique("nodes", snapshot.nodes)
    _unique("workloads", snapshot.workloads)
    budgets = snapshot.budgets
    for index, workload in enumerate(snapshot.workloads):
        for position, member in enumerate(workload.members):
            if member.node not in known:
                raise BadSnapshot(
                    f"workloads[{index}].members[{position}].node", f"no node is named {_quoted(member.node)}"
                )
        for position, budget in enumerate(workload.budgets):
            if budget not in budgets:
                raise BadSnapshot(f"workloads[{index}].budgets[{position}]", f"no budget is named {_quoted(budget)}")


def dump(snapshot: Snapshot) -> dict[str, Any]:
    """The JSON form of a snapshot; ``parse(dump(s)) == s``. Equal compatibility facts are written once."""
    keys: dict[Facts, str] = {}

    def plain(item: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for each in fields(item):
            value = getattr(item, each.name)
            if each.name == "facts":
                if value:
                    out["key"] = keys.setdefault(value, f"k{len(keys)}")
            elif each.name == "members":
                out["members"] = [{"node": m.node, "resources": dict(m.resources)} for m in value]
            elif each.name in ("name", "gpus") or value not in _EMPTY or each.name in _ALWAYS:
                out[each.name] = _jsonable(value)
        return out

    nodes = [plain(node) for node in snapshot.nodes]
    workloads = [plain(workload) for workload in snapshot.workloads]
    return {
        "format": FORMAT,
        "version": VERSION,
        **({"taken_at": snapshot.taken_at} if snapshot.taken_at else {}),
        "keys": {name: {k: _jsonable(v) for k, v in facts} for facts, name in keys.items()},
        "nodes": nodes,
        "workloads": workloads,
        "budgets": dict(snapshot.budgets),
        "durations": {each.name: getattr(snapshot.durations, each.name) for each in fields(Durations)},
        "queue": {
            model: {each.name: getattr(demand, each.name) for each in fields(Demand)}
            for model, demand in snapshot.queue.items()
        },
    }


_EMPTY: tuple[Any, ...] = (None, (), {}, "")
_ALWAYS = frozenset(("schedulable", "unfinished", "may", "gang", "at_risk", "start_cost", "priority"))


def _jsonable(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {name: _jsonable(each) for name, each in value.items()}
    return value


class _Wrong(Exception):
    """A value that does not fit; ``path`` is relative to the field being read."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path


def _text(value: Any) -> str:
    if type(value) is not str or not value:
        raise _Wrong(f"expected a non-empty string, not {_shown(value)}")
    return value


def _any_text(value: Any) -> str:
    if type(value) is not str:
        raise _Wrong(f"expected a string, not {_shown(value)}")
    return value


def _text_or_null(value: Any) -> str | None:
    return None if value is None else _text(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _Wrong(f"expected true or false, not {_shown(value)}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _TOO_MUCH:
        raise _Wrong(f"expected a whole number of 0 or more, below 2^60, not {_shown(value)}")
    return value


def _any_whole(value: Any) -> int:
    if type(value) is not int:
        raise _Wrong(f"expected a whole number, not {_shown(value)}")
    return value


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < _TOO_MUCH:
        raise _Wrong(f"expected a number of 0 or more, below 2^60, not {_shown(value)}")
    return value


def _amount_or_null(value: Any) -> float | None:
    return None if value is None else _amount(value)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _quoted(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _Wrong(f"expected a list, not {_shown(value)}")
    return value


def _object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise _Wrong(f"expected an object, not {_shown(value)}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    for index, item in enumerate(_list(value)):
        if type(item) is not str or not item:
            _each(_text, index, item)
    return tuple(value)


def _each(convert: Callable[[Any], Any], index: int, item: Any) -> Any:
    try:
        return convert(item)
    except _Wrong as exc:
        raise _Wrong(exc.message, f"[{index}]{exc.path}") from exc


def _named(convert: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """A converter of objects whose names are free and whose values ``convert`` takes."""

    def converted(value: Any) -> dict[str, Any]:
        out = {}
        for name, item in _object(value).items():
            try:
                out[name] = convert(item)
            except _Wrong as exc:
                raise _Wrong(exc.message, f".{name}{exc.path}") from exc
        return out

    return converted


def _resources(value: Any) -> dict[str, int]:
    for name, amount in _object(value).items():
        if type(amount) is not int or not 0 <= amount < _TOO_MUCH:
            raise _Wrong(f"expected a whole number of 0 or more, below 2^60, not {_shown(amount)}", f".{name}")
        if name.startswith("mig-") and not _MIG.match(name):
            raise _Wrong("expected a MIG profile such as mig-1g.10gb", f".{name}")
    return value


def _permissions(value: Any) -> frozenset[str]:
    return _allowed(_texts(value))


@lru_cache(maxsize=64)
def _allowed(permissions: tuple[str, ...]) -> frozenset[str]:
    found = frozenset(permissions)
    if found - PERMISSIONS:
        raise _Wrong(f"{_quoted(min(found - PERMISSIONS))} is none of {', '.join(sorted(PERMISSIONS))}")
    if PROTECT in found and len(found) > 1:
        raise _Wrong("protect excludes everything else")
    return found


def _members(value: Any) -> tuple[Member, ...]:
    return tuple(_each(_member, index, item) for index, item in enumerate(_list(value)))


def _member(value: Any) -> Member:
    if type(value) is not dict or len(value) != 2 or "node" not in value or "resources" not in value:
        raise _Wrong("expected an object with exactly node and resources")
    try:
        return Member(_text(value["node"]), _resources(value["resources"]))
    except _Wrong as exc:
        part = "resources" if type(value["node"]) is str and value["node"] else "node"
        raise _Wrong(exc.message, f".{part}{exc.path}") from exc


def _durations(value: Any) -> Durations:
    durations = Durations(**_part(value, {each.name: _amount for each in fields(Durations)}))
    if not durations.evacuate + durations.swap:
        raise _Wrong("an upgrade that takes no time cannot be planned; give at least install")
    return durations


def _demand(value: Any) -> Demand:
    return Demand(**_part(value, {each.name: _amount for each in fields(Demand)}))


def _part(value: Any, converters: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    out = {}
    for name, item in _object(value).items():
        convert = converters.get(name)
        if convert is None:
            raise _Wrong(f"unknown field; known are {', '.join(converters)}", f".{name}")
        try:
            out[name] = convert(item)
        except _Wrong as exc:
            raise _Wrong(exc.message, f".{name}{exc.path}") from exc
    return out


def _same(value: Any) -> Any:
    return value


_Converters = Mapping[str, Callable[[Any], Any]]

NODE_FIELDS: _Converters = {
    "name": _text,
    "gpu_model": _text_or_null,
    "gpus": _whole,
    "loaded": _text_or_null,
    "installed": _text_or_null,
    "free": _resources,
    "schedulable": _flag,
    "cordoned_by": _text_or_null,
    "domains": _named(_text),
    "labels": _named(_any_text),
    "taints": _texts,
    "key": _same,
    "skip": _text_or_null,
    "unfinished": _flag,
}
WORKLOAD_FIELDS: _Converters = {
    "name": _text,
    "members": _members,
    "kind": _text,
    "owner": _text_or_null,
    "gang": _flag,
    "may": _permissions,
    "backends": _texts,
    "key": _same,
    "remaining": _amount_or_null,
    "at_risk": _amount,
    "start_cost": _amount,
    "capture": _amount,
    "restore": _amount,
    "priority": _any_whole,
    "budgets": _texts,
    "requires": _named(_texts),
    "tolerates": _texts,
    "together": _text_or_null,
    "spread": _text_or_null,
    "stays_home": _flag,
    "stand_in": _text_or_null,
}
SNAPSHOT_FIELDS: _Converters = {
    "format": _text,
    "version": _whole,
    "taken_at": _text_or_null,
    "keys": _named(_object),
    "nodes": _list,
    "workloads": _list,
    "budgets": _named(_whole),
    "durations": _durations,
    "queue": _named(_demand),
}
_REQUIRED = {"snapshot": ("version", "nodes"), "nodes": ("name",), "workloads": ("name", "members")}


def _fields(data: Any, what: str, converters: _Converters) -> dict[str, Any]:
    if type(data) is not dict:
        raise BadSnapshot(what, f"expected an object, not {_shown(data)}")
    out = {}
    for name, value in data.items():
        convert = converters.get(name)
        if convert is None:
            raise BadSnapshot(name, f"unknown field; known are {', '.join(converters)}")
        try:
            out[name] = convert(value)
        except _Wrong as exc:
            raise BadSnapshot(name + exc.path, exc.message) from exc
    for name in _REQUIRED.get(what, ()):
        if name not in out:
            raise BadSnapshot(name, "is missing")
    return out


def _made(
    kind: Any,
    converters: _Converters,
    data: Any,
    what: str,
    index: int,
    names: Mapping[str, Facts],
    interned: dict[Facts, Facts],
) -> Any:
    try:
        values = _fields(data, what, converters)
        if "key" in values:
            values["facts"] = _key(values.pop("key"), names, interned)
    except BadSnapshot as exc:
        path, dummy, message = str(exc).partition(": ")
        dotted = "" if path == what else f".{path}"
        raise BadSnapshot(f"{what}[{index}]{dotted}", message) from exc
    return kind(**values)


def _key(value: Any, names: Mapping[str, Facts], interned: dict[Facts, Facts]) -> Facts:
    if type(value) is str:
        if value not in names:
            raise BadSnapshot("key", f"no entry of keys is named {_quoted(value)}")
        return names[value]
    if type(value) is not dict:
        raise BadSnapshot("key", f"expected the name of an entry of keys, or an object, not {_shown(value)}")
    return _facts(value, interned, "key")


def _facts(value: Mapping[str, Any], interned: dict[Facts, Facts], path: str) -> Facts:
    pairs = []
    for name in sorted(value):
        fact = value[name]
        if isinstance(fact, list) and all(isinstance(each, str) for each in fact):
            fact = tuple(sorted(fact))
        elif fact is not None and not isinstance(fact, (str, int, float)):
            raise BadSnapshot(f"{path}.{name}", f"expected text, a number or a list of texts, not {_shown(fact)}")
        pairs.append((name, fact))
    facts = tuple(pairs)
    return interned.setdefault(facts, facts)


def _unique(what: str, items: tuple[Any, ...]) -> dict[str, int]:
    known: dict[str, int] = {}
    for index, item in enumerate(items):
        if known.setdefault(item.name, index) != index:
            raise BadSnapshot(f"{what}[{index}].name", f"{_quoted(item.name)} is already {what}[{known[item.name]}]")
    return known
