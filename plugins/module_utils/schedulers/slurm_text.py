# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Slurm's commands print, as data. Pure: nothing here runs a command.

The text forms of ``scontrol -o -d show node``, ``scontrol -o show reservation`` and ``squeue -O`` are read, because
they are the same from Slurm 22.05 on and the cheapest for it to make; all with ``SLURM_TIME_FORMAT=%s``.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

Resources = Mapping[str, int]
"""``gpu`` (whole GPUs) and ``mig-<profile>`` (instances); for jobs also ``cpu`` (millicores) and ``memory`` (bytes)."""

UNFINISHED_ON_NODE = frozenset(
    ("RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
)
"""States of a job that may have processes on its nodes. A suspended one holds its GPUs."""

_BUSY = frozenset(("ALLOCATED", "MIXED", "COMPLETING"))
_REBOOTING = frozenset(("REBOOT", "REBOOT_REQUESTED", "REBOOT_ISSUED", "BOOT", "POWERING_UP", "POWERING_DOWN"))
_OUT = frozenset(("DRAIN", "DOWN", "FAIL", "FAILING", "INVALID_REG", "POWERED_DOWN", "POWERING_DOWN", "FUTURE"))
_SHORT = {
    "INVAL": "INVALID_REG",
    "DRAINED": "DRAIN",
    "DRAINING": "DRAIN",
    "DRNG": "DRAIN",
    "MAINT": "MAINTENANCE",
    "COMP": "COMPLETING",
    "UNK": "UNKNOWN",
}
_MARKS = {"*": "NOT_RESPONDING", "$": "MAINTENANCE", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED"}


@lru_cache(maxsize=4096)
def flags(state: str | tuple[str, ...]) -> frozenset[str]:
    """A node's state as the set of words that Slurm joins, whether it is ``MIXED+DRAIN``, ``draining*`` or a tuple.

    A word that nobody knows yet is kept as it is.
    """
    words: set[str] = set()
    for text in state.split("+") if isinstance(state, str) else state:
        bare = text.rstrip("*$@^~#!%-")
        words.update(_MARKS[mark] for mark in text[len(bare) :] if mark in _MARKS)
        words.add(_SHORT.get(bare.upper(), bare.upper()))
    return frozenset(words - {""})


class Node(NamedTuple):
    """A node as slurmctld knows it. ``gres`` is what is configured, ``used`` what jobs hold. Times in Unix seconds."""

    name: str
    state: frozenset[str]
    address: str = ""
    reason: str = ""
    reason_by: str = ""
    reason_at: float | None = None
    available: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    model: str | None = None
    gres: Resources = {}
    used: Resources = {}
    cpus: int = 0
    cpus_used: int = 0
    memory: int = 0
    """Bytes."""
    memory_used: int = 0

    @property
    def drain(self) -> bool:
        return "DRAIN" in self.state

    @property
    def silent(self) -> bool:
        """slurmd does not answer, or slurmctld has not heard of it since it started."""
        return bool(self.state & {"NOT_RESPONDING", "UNKNOWN"})

    @property
    def out(self) -> bool:
        """Gets no new work because of its own state. Only Slurm knows about reservations."""
        return bool(self.state & _OUT)

    def busy(self) -> str:
        """Why the node itself may still have work, or an empty text. Jobs are to be asked for as well: a suspended one
        holds its GPUs on a node that is "drained", as a job does while slurmctld has just started."""
        if not self.drain:
            return "it is not drained"
        if self.silent:
            return "its slurmd does not answer, so nobody knows what runs there"
        found = sorted(self.state & (_BUSY | _REBOOTING))
        if found:
            return f"its state is {'+'.join(sorted(self.state))}"
        return f"{self.cpus_used} CPUs are allocated" if self.cpus_used else ""


def nodes(text: str) -> dict[str, Node]:
    """``scontrol -o -d show node``: name → node. A line that is no node is left out."""
    found = (_node(line) for line in text.split("\n") if line.startswith("NodeName="))
    return {node.name: node for node in found}


_REASON = re.compile(r"(.*?) \[([^@\]]*)@([^\]]*)\]")


def _node(line: str) -> Node:
    reason, by, at = "", "", None
    start = line.find(" Reason=")
    if start > 0:
        matched = _REASON.match(line, start + len(" Reason="))
        if matched:
            reason, by, at = matched.group(1), matched.group(2), moment(matched.group(3))
        else:
            reason = line[start + len(" Reason=") :]
    state, partitions = _state(_stretch(line, " State=", " BootTime="))
    available, active, model, gres, used = _gres(_stretch(line, " AvailableFeatures=", " NodeAddr="))
    cpus, cpus_used = _cpus(_stretch(line, " CPUAlloc=", " CPULoad="))
    memory, memory_used = _memory(_stretch(line, " RealMemory=", " FreeMem="))
    return Node(
        line[len("NodeName=") : line.index(" ")],
        state,
        _stretch(line, " NodeAddr=", " ")[len(" NodeAddr=") :],
        reason,
        by,
        at,
        available,
        active,
        partitions,
        model,
        gres,
        used,
        cpus,
        cpus_used,
        memory,
        memory_used,
    )


def _stretch(line: str, first: str, after: str) -> str:
    """From the word that begins with ``first`` to before ``after``; without that, to the end. What it says is read once
    for all nodes that are alike, whose records differ elsewhere."""
    start = line.find(first)
    if start < 0:
        return ""
    end = line.find(after, start + 1)
    return line[start:end] if end > 0 else line[start:]


def _words(stretch: str) -> dict[str, str]:
    pairs = (word.split("=", 1) for word in stretch.split(" ") if "=" in word)
    return {key: value for key, value in pairs if value not in ("(null)", "N/A")}


@lru_cache(maxsize=4096)
def _state(stretch: str) -> tuple[frozenset[str], tuple[str, ...]]:
    said = _words(stretch)
    return flags(said.get("State", "")), _listed(said.get("Partitions", ""))


@lru_cache(maxsize=4096)
def _gres(stretch: str) -> tuple[tuple[str, ...], tuple[str, ...], str | None, Resources, Resources]:
    said = _words(stretch)
    gres, model = gres_of(said.get("Gres", ""))
    features = _listed(said.get("AvailableFeatures", "")), _listed(said.get("ActiveFeatures", ""))
    return (*features, model, gres, gres_of(said.get("GresUsed", ""))[0])


@lru_cache(maxsize=4096)
def _cpus(stretch: str) -> tuple[int, int]:
    said = _words(stretch)
    return whole(said.get("CPUEfctv") or said.get("CPUTot", "")), whole(said.get("CPUAlloc", ""))


@lru_cache(maxsize=4096)
def _memory(stretch: str) -> tuple[int, int]:
    said = _words(stretch)
    return whole(said.get("RealMemory", "")) << 20, whole(said.get("AllocMem", "")) << 20


@lru_cache(maxsize=4096)
def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


_MIG = re.compile(r"\d+g\.\d+gb")
_GRES = re.compile(r"gpu(?::(?P<type>[^:(),]+))?(?::(?P<count>\d+)(?P<unit>[KM]?))?(?:\([^)]*\))?(?:,|$)")


@lru_cache(maxsize=4096)
def gres_of(text: str) -> tuple[Resources, str | None]:
    """GPUs in a list of generic resources, and the type that whole ones are said to have.

    ``gpu:h100:4(S:0-1)`` is ``{"gpu": 4}`` of type ``h100``; a type that holds a MIG profile, as ``1g.10gb`` or
    ``a100_1g.5gb``, counts as instances of it: ``{"mig-1g.10gb": 7}``. Other resources are left out.
    """
    total: dict[str, int] = {}
    model = None
    for part in _GRES.finditer(text.replace("gres:", "").replace("gres/", "")):
        kind, count = part.group("type"), part.group("count")
        if kind and kind.isdigit() and count is None:
            kind, count = None, kind
        profile = _MIG.search(kind or "")
        if kind and not profile:
            model = model or kind
        name = f"mig-{profile.group()}" if profile else "gpu"
        scale = {"K": 1024, "M": 1 << 20}.get(part.group("unit") or "", 1)
        total[name] = total.get(name, 0) + (1 if count is None else int(count) * scale)
    return total, model


_COUNT_REASON = re.compile(r"gres/gpu count (?:reported lower than configured|too low) \((\d+) < (\d+)\)")


def gpus_missing(reason: str) -> tuple[int, int] | None:
    """(seen, configured) if Slurm itself drained a node because it found fewer GPUs than its configuration says."""
    found = _COUNT_REASON.search(reason)
    return (int(found.group(1)), int(found.group(2))) if found else None


_CREDENTIALS = re.compile(r"^AuthInfo\s*=.*\bcred_expire=(\d+)", re.MULTILINE)


def credential_seconds(text: str) -> int:
    """``scontrol show config``: how long a job's credential is good. A node refuses a job that was taken off it within
    that time, and Slurm then ends the job as failed; so Slurm itself lets a requeued job wait so long. Less than five
    seconds is ignored by Slurm."""
    found = _CREDENTIALS.search(text)
    seconds = int(found.group(1)) if found else 0
    return seconds if seconds >= 5 else 120


@dataclass(frozen=True)
class Reservation:
    name: str
    nodes: tuple[str, ...]
    flags: frozenset[str]
    active: bool
    start: float | None = None
    end: float | None = None


def reservations(text: str) -> dict[str, Reservation]:
    """``scontrol -o show reservation``: name → reservation; none if there is none."""
    found = {}
    for line in text.split("\n"):
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        if not line.startswith("ReservationName="):
            continue
        members = words.get("Nodes", "(null)")
        found[words["ReservationName"]] = Reservation(
            words["ReservationName"],
            () if members == "(null)" else tuple(expand(members)),
            frozenset(words.get("Flags", "").split(",")) - {""},
            words.get("State") == "ACTIVE",
            moment(words.get("StartTime", "")),
            moment(words.get("EndTime", "")),
        )
    return found


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array. ``shown`` is the id as people write it (``12_3``), ``id`` the one to act on.

    That is ``12_3`` too: the last task of an array has the number of the whole array as its own (JobID).

    ``resources`` is its part on each of its ``nodes``. Texts that its owner chose (``name``, ``comment``,
    ``constraint``) are untrusted. ``batch`` jobs can be requeued if ``requeue`` says so; the others are interactive.
    """

    id: str
    shown: str
    state: str
    user: str
    nodes: tuple[str, ...]
    batch: bool
    requeue: bool
    het: str = ""
    partition: str = ""
    limit: float | None = None
    started: float | None = None
    ends: float | None = None
    used: float = 0.0
    tasks: int = 1
    """Jobs that it stands for: the waiting tasks of an array are one line."""
    width: int = 1
    """Nodes that it has, or waits for."""
    held: bool = False
    resources: Resources = field(default_factory=dict)
    model: str | None = None
    required: tuple[str, ...] = ()
    constraint: str = ""
    name: str = ""
    comment: str = ""
    admin_comment: str = ""
    reason: str = ""

    @property
    def on_node(self) -> bool:
        """Whether it may have processes on its nodes."""
        return bool(self.nodes) and self.state in UNFINISHED_ON_NODE


_FIELDS = (
    "JobID", "JobArrayID", "HetJobID", "PriorityLong", "State", "UserName", "NodeList", "TimeLimit", "StartTime",
    "EndTime", "TimeUsed", "NumNodes", "NumTasks", "NumCPUs", "Partition", "BatchFlag", "Requeue", "tres-alloc",
    "tres-per-node", "tres-per-job", "tres-per-task", "tres-per-socket", "ReqNodes",
)  # fmt: skip
_FREE_FIELDS = ("Feature", "Name", "Comment", "admin_comment", "Reason")
_UNIT = "\x1f"


def job_format(nonce: str) -> str:
    """The ``-O`` argument of squeue whose output :func:`jobs` reads.

    Job names and comments are their owners' and may hold line ends and any separator, so these fields, and each
    record, end with a ``nonce`` that nobody can guess.
    """
    plain = [f"{name}:0{_UNIT}" for name in _FIELDS]
    free = [f"{name}:0{_UNIT}{nonce}" for name in _FREE_FIELDS]
    return ",".join([*plain, *free]) + _UNIT


def jobs(text: str, nonce: str) -> list[Job]:
    """The jobs that squeue listed with :func:`job_format` of the same ``nonce``.

    :raises ValueError: if a record has not the fields asked for.
    """
    return [_job(record, nonce) for record in text.split(f"{_UNIT}{nonce}{_UNIT}\n") if record.strip()]


_TASK = re.compile(r"\d+_\d+")


def _job(record: str, nonce: str) -> Job:
    head, *free = record.split(f"{_UNIT}{nonce}")
    fields = head.split(_UNIT, len(_FIELDS))
    if len(fields) != len(_FIELDS) + 1 or len(free) != len(_FREE_FIELDS) - 1:
        raise ValueError(f"squeue printed {len(fields) + len(free)} fields, beginning with {record[:80]!r}")
    said = {name: "" if word in ("(null)", "N/A") else word for name, word in zip(_FIELDS, fields)}
    constraint, name, comment, admin_comment, reason = (
        "" if word == "(null)" else word for word in (fields[-1], *free)
    )
    count = max(1, whole(said["NumNodes"]))
    tasks = max(1, whole(said["NumTasks"]))
    resources, model = _share(said, count, tasks)
    shown = said["JobArrayID"] or said["JobID"]
    return Job(
        id=shown if _TASK.fullmatch(shown) else said["JobID"],
        shown=shown,
        state=said["State"],
        user=said["UserName"],
        nodes=tuple(expand(said["NodeList"])),
        batch=said["BatchFlag"] == "1",
        requeue=said["Requeue"] == "1",
        het="" if said["HetJobID"] == "0" else said["HetJobID"],
        partition=said["Partition"],
        limit=seconds(said["TimeLimit"]),
        started=moment(said["StartTime"]),
        ends=moment(said["EndTime"]),
        used=seconds(said["TimeUsed"]) or 0.0,
        tasks=pending_tasks(said["JobArrayID"]),
        width=count,
        held=said["PriorityLong"] == "0",
        resources=resources,
        model=model,
        required=tuple(expand(said["ReqNodes"])),
        constraint=constraint,
        name=name,
        comment=comment,
        admin_comment=admin_comment,
        reason=reason,
    )


def _share(said: Mapping[str, str], count: int, tasks: int) -> tuple[dict[str, int], str | None]:
    """What a job holds on each of its nodes. Slurm tells which GPUs it gave only where they are among
    AccountingStorageTRES; otherwise what was asked for has to do, shared evenly."""
    given = dict(part.split("=", 1) for part in said["tres-alloc"].split(",") if "=" in part)
    gpus = {name[len("gres/") :]: amount for name, amount in given.items() if name.startswith("gres/gpu")}
    with_type = {name: amount for name, amount in gpus.items() if ":" in name}  # gres/gpu counts these once more
    listed = ",".join(f"{name}:{amount}" for name, amount in (with_type or gpus).items())
    asked = (
        (listed, 1, count),
        (said["tres-per-node"], 1, 1),
        (said["tres-per-job"], 1, count),
        (said["tres-per-task"], tasks, count),
        (said["tres-per-socket"], 1, 1),
    )
    share: dict[str, int] = {}
    model = None
    for text, times, parts in asked:
        found, model = gres_of(text)
        if found:
            share = {name: -(-amount * times // parts) for name, amount in found.items()}
            break
    cpus = whole(given.get("cpu", "")) or whole(said["NumCPUs"])
    share["cpu"] = cpus * 1000 // count
    if given.get("mem"):
        share["memory"] = size(given["mem"]) // count
    return share, model


def pending_tasks(shown: str) -> int:
    """Tasks that one line stands for: ``12_[3-5,9%2]`` is four; anything else is one."""
    start = shown.find("_[")
    if start < 0:
        return 1
    total = 0
    for part in shown[start + 2 :].rstrip("]").partition("%")[0].split(","):
        first, dummy, last = part.partition("-")
        last, dummy, step = last.partition(":")
        if first.isdigit():
            total += (int(last) - int(first)) // int(step or 1) + 1 if last.isdigit() else 1
    return max(1, total)  # a very long list is cut off with "..."


_BRACKET = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> list[str]:
    """The names that a host list stands for: ``gpu-[01-02,7],login`` is gpu-01, gpu-02, gpu-7 and login."""
    found: list[str] = []
    for part in _outside_brackets(text):
        found.extend(_each_name(part))
    return found


def _outside_brackets(text: str) -> Iterator[str]:
    if "[" not in text:
        yield from (part for part in text.split(",") if part)
        return
    start, depth = 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if text[start:]:
        yield text[start:]


def _each_name(part: str) -> list[str]:
    group = _BRACKET.search(part)
    if group is None:
        return [part]
    numbers: list[str] = []
    for piece in group.group(1).split(","):
        first, dash, last = piece.partition("-")
        if dash:
            numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        else:
            numbers.append(first)
    rest = _each_name(part[group.end() :])
    return [f"{part[: group.start()]}{number}{tail}" for number in numbers for tail in rest]


def moment(text: str) -> float | None:
    """Unix seconds; None for ``N/A``, ``NONE``, ``Unknown`` and the like."""
    return float(text) if text.isdigit() else None


def seconds(text: str) -> float | None:
    """A duration such as ``1-02:03:04``, ``10:00`` or ``59``; None for ``UNLIMITED`` and the like."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()):
        return None
    total = 0
    if dash:
        parts += ["0"] * (3 - len(parts))
    for part in parts:
        total = total * 60 + int(part)
    return float(total + int(days or 0) * 86400)


def whole(text: str) -> int:
    return int(text) if text.isdigit() else 0


_SIZES = {"K": 10, "M": 20, "G": 30, "T": 40, "P": 50}


def size(text: str) -> int:
    """Bytes of ``16000M`` or ``1.50G``; a bare number is in megabytes, as everywhere in Slurm."""
    unit = text[-1:].upper()
    number = text[:-1] if unit in _SIZES else text
    try:
        return int(float(number) * (1 << _SIZES.get(unit, 20)))
    except ValueError:
        return 0
