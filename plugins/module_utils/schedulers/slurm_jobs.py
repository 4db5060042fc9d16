# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What may be done to a Slurm job, what is done to it next, and how a cluster looks to the planner. Pure.

A job's owner says in its comment how it saves itself, in words among others::

    sbatch --comment="gpufleet.signal=USR1 gpufleet.saved=/scratch/run7/step.pt" ...

``gpufleet.may=wait`` (or ``restart``, ``move``, ``protect``, joined by commas) narrows what may be done. What this
collection does to a job is noted in its AdminComment, which its owner can read and nobody else writes, so that any
later call, from any machine, can go on. All tasks of an array have one comment: ``%A`` and ``%a`` in the file's name
are the array's number and the task's, as in sbatch's own names of files.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_text import (
    Job,
    Node,
    Reservation,
)

DRIVER_FEATURE = "driver-"
RESERVATION = "gpufleet-"
_A_YEAR = 365 * 86400.0


_REASON = re.compile(r"gpufleet: .*\brun=(\S+)")
"""Words that somebody added to ours make the drain that person's."""


def our_run(node: Node) -> str | None:
    """The run that drained the node; a reason alone says nothing, Slurm may keep it on a node that works again."""
    found = _REASON.fullmatch(node.reason) if node.drain else None
    return found.group(1) if found else None


@dataclass(frozen=True)
class Policy:
    """What is done to jobs that Slurm cannot requeue: ``interactive`` ones (``wait`` or ``cancel``) and batch jobs
    submitted with ``--no-requeue`` (``wait``, ``cancel`` or ``requeue`` all the same). ``save_timeout`` in seconds."""

    interactive: str = "wait"
    no_requeue: str = "wait"
    save_timeout: float = 300.0


@dataclass(frozen=True)
class Declared:
    """What the owner says in the job's comment."""

    signal: str = ""
    saved: str = ""
    may: frozenset[str] | None = None


_MOST_OF_A_PATH = 1024
_WORD = re.compile(r"(?:^|\s)gpufleet\.(signal|saved|may)=(\S+)")
_SIGNAL = re.compile(r"(?:SIG)?([A-Z][A-Z0-9]{1,8}|\d{1,2})")


def declared(job: Job) -> Declared:
    """Words that make no sense count as not said, but a ``may`` that nobody understands allows nothing but waiting."""
    said = dict(_WORD.findall(job.comment))
    signal = _SIGNAL.fullmatch(said.get("signal", ""))
    saved = said.get("saved", "")
    array, dummy, task = job.shown.partition("_")
    if task:
        saved = saved.replace("%A", array).replace("%a", task)
    may = None
    if "may" in said:
        may = frozenset(said["may"].split(","))
        if not may or may - fleet.PERMISSIONS:
            may = frozenset((fleet.WAIT,))
    if not signal or not saved.startswith("/") or len(saved) > _MOST_OF_A_PATH:
        return Declared(may=may)
    return Declared(signal.group(1), saved, may)


def shared_saves(jobs: Iterable[Job]) -> frozenset[str]:
    """The save files that several workloads on nodes name: a new one does not say whose work is safe."""
    named = {(declared(job).saved, called(job)) for job in jobs if job.on_node and job.comment}
    return frozenset(file for file, count in Counter(file for file, dummy in named if file).items() if count > 1)


def allowed(job: Job, policy: Policy, shared: Collection[str] = ()) -> frozenset[str]:
    """What may be done to a job: ``wait``, ``restart``, ``move``, or ``protect`` alone. One whose save file is
    ``shared`` with others is only waited for."""
    said = declared(job)
    can = {fleet.WAIT}
    if said.saved in shared:
        pass
    elif job.batch and (job.requeue or policy.no_requeue == "requeue"):
        can.add(fleet.RESTART)
        if said.saved:
            can.add(fleet.MOVE)
    elif (policy.no_requeue if job.batch else policy.interactive) == "cancel":
        can.add(fleet.RESTART)
    if said.may is None:
        return frozenset(can)
    if fleet.PROTECT in said.may:
        return frozenset((fleet.PROTECT,))
    return frozenset(can & said.may) or frozenset((fleet.WAIT,))


@dataclass(frozen=True)
class Token:
    """What we noted about a job. ``step`` is how far it is: ``asked`` to save itself, ``held`` in the queue by us, or
    ``done`` with; ``at`` is when that began (Unix seconds). ``seen`` tells its save file before it was asked.
    ``feature`` is the node feature that it is bound to, and ``was`` its constraint without it. ``off`` are the nodes,
    joined by commas, that it was taken off."""

    run: str
    step: str
    at: int
    seen: str = ""
    feature: str = ""
    was: str = ""
    off: str = ""


_TOKEN = re.compile(
    r"(?:^| \| )gpufleet: [^\[\]]*"
    r"\[run=(\S+) step=(asked|held|done) at=(\d+) seen=(\S*) feature=(\S*) was=(\S*) off=(\S*)\]$"
)


def token(admin_comment: str) -> Token | None:
    found = _TOKEN.search(admin_comment)
    if not found:
        return None
    run, step, at, *rest = found.groups()
    return Token(run, step, int(at), *rest)


def without_token(admin_comment: str) -> str:
    found = _TOKEN.search(admin_comment)
    return admin_comment[: found.start()] if found else admin_comment


def with_token(admin_comment: str, message: str, noted: Token) -> str:
    """``message`` is for the owner; it may hold what a user wrote."""
    others = without_token(admin_comment)
    fields = " ".join(f"{name}={value}" for name, value in asdict(noted).items())
    text = f"gpufleet: {message.replace('[', '(').replace(']', ')')} [{fields}]"
    return f"{others} | {text}" if others else text


BAD_CONSTRAINTS = "BadConstraints"
"""The reason of a job that wants a feature which no node has. Slurm then gives it no priority, and does not take it up
again if the feature comes back, until its constraint is set, even if to the same."""

_REQUEUED_HELD = "job requeued in held state"
"""The reason that ``scontrol requeuehold`` gives a job, also after a restart of slurmctld."""

_SIMPLE = re.compile(r"[\w.:-]+(?:&[\w.:-]+)*")


def bound(constraint: str, feature: str) -> str | None:
    """The job's ``constraint`` and ``feature`` besides; None if that cannot be said with certainty: it has
    alternatives or counts, or speaks of a driver already."""
    if not constraint:
        return feature
    if not _SIMPLE.fullmatch(constraint) or DRIVER_FEATURE in constraint:
        return None
    return f"{constraint}&{feature}"


_OUR_FEATURE = re.compile(rf"{DRIVER_FEATURE}\d[\d.]*")
"""A site may have others, as ``driver-lts``."""


def is_bound(job: Job, noted: Token) -> bool:
    """Whether the job has a constraint that we gave it, with this driver or, if we died since, that of a move before.
    Its owner may have set another meanwhile."""
    own, dummy, last = job.constraint.rpartition("&")
    return bool(noted.feature) and own == noted.was and bool(_OUR_FEATURE.fullmatch(last))


def own_constraint(job: Job) -> str:
    """The job's constraint without what we added to it when we moved it."""
    noted = token(job.admin_comment)
    return noted.was if noted and is_bound(job, noted) else job.constraint


def version_of(node: Node) -> str | None:
    """The driver version that a node's features tell."""
    return _version_in(node.active)


@lru_cache(maxsize=4096)
def _version_in(features: tuple[str, ...]) -> str | None:
    for name in features:
        if _OUR_FEATURE.fullmatch(name):
            return name[len(DRIVER_FEATURE) :]
    return None


def features_with(node: Node, version: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The available and the active features a node should have with that driver version: all others are kept, in their
    order."""
    available, active = (
        (*(name for name in names if not _OUR_FEATURE.fullmatch(name)), f"{DRIVER_FEATURE}{version}")
        for names in (node.available, node.active)
    )
    return available, active


ENDING = 240.0
"""Seconds that a job may take to end, with its epilog, before its node is given up at the deadline."""


@dataclass(frozen=True)
class Step:
    """What is done to a job now: ``wait``, ``signal``, ``hold`` (requeue it held), ``requeue``, ``cancel`` or
    ``fail`` (its node cannot be emptied); ``why`` is shown to people: words that follow on "this job"."""

    do: str
    why: str


def next_step(
    job: Job,
    fate: str,
    now: float,
    deadline: float,
    policy: Policy,
    noted: Token | None,
    saved: bool,
    shared: Collection[str] = (),
) -> Step:
    """``fate`` is the plan's word or an empty text. ``noted`` is what this run noted about the job, and ``saved``
    says that its save file was replaced since it was asked to. ``shared`` are the save files that several jobs name.
    """
    may = allowed(job, policy, shared)
    late = now >= deadline
    if job.state == "COMPLETING":
        return _ending(job, noted, now, deadline)
    moves = fate == "move" and fleet.MOVE in may
    restarts = fleet.RESTART in may and (late or fate in ("cold_start", "move"))
    said = declared(job)
    # one that can save itself does so whatever becomes of it; a suspended one does not hear its signal
    if (moves or restarts) and job.batch and said.saved and job.state != "SUSPENDED":
        if noted is None or noted.step != "asked":
            return Step("signal", f"is asked by {said.signal} to save itself to {said.saved}")
        if saved:
            return Step("hold" if moves else "requeue", f"has saved itself to {said.saved}")
        if now < noted.at + policy.save_timeout:
            return Step("wait", f"saves itself to {said.saved}")
        if moves and not late:
            return Step("wait", f"has not saved itself to {said.saved} within {policy.save_timeout:.0f} s and runs on")
    if restarts:
        why = "the time to wait for it is over" if late else "the plan starts it anew"
        if noted and noted.step == "asked":
            why += f", and it has not saved itself to {said.saved} within {policy.save_timeout:.0f} s"
        if job.batch and (job.requeue or policy.no_requeue == "requeue"):
            return Step("requeue", f"is put back into the queue, since {why}")
        return Step("cancel", f"is ended, since {why} and Slurm cannot requeue it")
    if late:
        left = _why_left(job, may, said.saved if said.saved in shared else "")
        return Step("fail", f"{left}; ask {job.user}, or end it: scancel {job.shown}")
    if job.state == "SUSPENDED":
        return Step("wait", f"is suspended and holds its GPUs; resume it: scontrol resume {job.shown}")
    alone = ", and alone can end it, since other jobs name its save file too" if said.saved in shared else ""
    return Step("wait", f"runs, {_when(job.ends)}{alone}")


def _ending(job: Job, noted: Token | None, now: float, deadline: float) -> Step:
    """One that does not come to its end has an epilog that hangs, or processes that cannot be killed. Slurm says when a
    job began to end, but not of one that is requeued."""
    since = job.ends if job.ends is not None and job.ends <= now else deadline
    if noted and noted.step in ("done", "held"):
        since = noted.at
    if now < max(deadline, since + ENDING):
        return Step("wait", "is ending")
    node = job.nodes[0]
    return Step(
        "fail",
        f"does not come to its end; see on {node} what is left of it or of its epilog: ps -ef; "
        f"if nothing is: scontrol update nodename={node} state=down reason=stuck, then state=resume",
    )


def _why_left(job: Job, may: frozenset[str], shared: str) -> str:
    if fleet.PROTECT in may:
        return "its owner protects it"
    if shared:
        return (
            f"it is one of several jobs that name the file {shared} as their save, so nobody can tell whose was "
            f"written; name one for each (%A and %a are an array's number and its task's): scontrol update "
            f"jobid={job.shown} comment=..."
        )
    if not job.batch:
        return "it is interactive"
    if not job.requeue:
        return "it was submitted with --no-requeue"
    return "its owner allows only to wait for it"


def _when(ends: float | None) -> str:
    if ends is None:
        return "without a time limit"
    return f"until {datetime.fromtimestamp(ends).astimezone():%Y-%m-%d %H:%M} at most"


def held_by_nobody(jobs: Iterable[Job]) -> list[str]:
    """Of the jobs that wait in the queue because they were requeued held, those that can save themselves and bear no
    note: we may have held them, and a site's epilog may have written over our note before we died."""
    return [
        f"{called(job)} of {job.user} was requeued and is held, and nothing says by whom; if by an upgrade that died: "
        f"scontrol release {job.shown}"
        for job in jobs
        if job.state == "PENDING"
        and job.held
        and job.reason == _REQUEUED_HELD
        and declared(job).saved
        and not token(job.admin_comment)
    ]


def still_bound(jobs: Iterable[Job]) -> list[str]:
    """The jobs on nodes that we bound to a driver: Slurm lets nobody change that before they are in the queue again."""
    bound_to = [
        (job, found) for job in jobs if job.on_node and (found := token(job.admin_comment)) and is_bound(job, found)
    ]
    return [
        f"{called(job)} of {job.user} still runs bound to nodes with {found.feature}; if it comes back to the queue "
        f"when there are none: scontrol update jobid={job.shown} {shlex.quote(f'features={found.was}')}"
        for job, found in bound_to
    ]


def maintained(reservations: Mapping[str, Reservation]) -> dict[str, str]:
    """The nodes that somebody else has reserved for maintenance now, and that reservation's name."""
    return {
        node: reservation.name
        for reservation in reservations.values()
        if reservation.active and "MAINT" in reservation.flags and not reservation.name.startswith(RESERVATION)
        for node in reservation.nodes
    }


def called(job: Job) -> str:
    """Its name among the plan's workloads."""
    return f"job {job.shown.partition('+')[0]}"


def grouped(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """The jobs by workload name: the components of a heterogeneous job are one workload."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(called(job), []).append(job)
    return found


# ---- a cluster as the planner sees it --------------------------------------------------------------------------------


def snapshot(
    nodes: Mapping[str, Node],
    jobs: Sequence[Job],
    reservations: Mapping[str, Reservation],
    names: Sequence[str],
    ours: Mapping[str, str],
    now: float,
    policy: Policy,
) -> fleet.Snapshot:
    """Every node with GPUs or in ``names``, the work on them, and the GPUs that queued work wants, by model. Memory
    counts only where Slurm hands it out.

    ``ours`` maps the nodes that this collection drained to the run that did it.
    """
    closed = maintained(reservations)
    wanted = set(names)
    memory = any(node.memory_used for node in nodes.values())
    shown = {name: node for name, node in nodes.items() if node.gres or name in wanted}
    workloads = []
    shared = shared_saves(jobs)
    for name, members in grouped(job for job in jobs if job.on_node).items():
        if any(node in shown for member in members for node in member.nodes):
            workloads.append(_workload(name, members, shown, now, policy, memory, shared))
    return fleet.Snapshot(
        nodes=tuple(_planned_node(node, closed.get(name), name in ours, memory) for name, node in shown.items()),
        workloads=tuple(workloads),
        taken_at=datetime.fromtimestamp(now).astimezone().isoformat(timespec="seconds"),
        queue=_queue(jobs, nodes),
    )


def _planned_node(node: Node, closed: str | None, ours: bool, memory: bool) -> fleet.Node:
    cordoned_by = None
    if node.drain and not ours:
        cordoned_by = f"{node.reason_by or 'somebody'}: {node.reason or 'no reason given'}"
    elif node.out and not ours:
        cordoned_by = f"Slurm: {'+'.join(sorted(node.state))}" + (f" ({node.reason})" if node.reason else "")
    elif closed:
        cordoned_by = f"reservation {closed}"
    used = node.used
    free = {name: max(0, amount - used.get(name, 0)) for name, amount in node.gres.items()}
    free["cpu"] = max(0, node.cpus - node.cpus_used) * 1000
    if memory:
        free["memory"] = max(0, node.memory - node.memory_used)
    return fleet.Node(
        name=node.name,
        gpu_model=node.model,
        gpus=node.gres.get("gpu", 0),
        loaded=version_of(node),
        free=free,
        schedulable=not (node.out or node.silent or closed),
        cordoned_by=cordoned_by,
        domains=_domains(node.partitions),
        labels=_labels(node.active, node.partitions),
    )


@lru_cache(maxsize=4096)
def _domains(partitions: tuple[str, ...]) -> Mapping[str, str]:
    return {"partition": partitions[0]} if partitions else {}


@lru_cache(maxsize=4096)
def _labels(features: tuple[str, ...], partitions: tuple[str, ...]) -> Mapping[str, str]:
    """Nodes that are alike share one."""
    names = [*(f"feature.{name}" for name in features), *(f"partition.{name}" for name in partitions)]
    return dict.fromkeys(names, "true")


def _workload(
    name: str,
    members: Sequence[Job],
    nodes: Mapping[str, Node],
    now: float,
    policy: Policy,
    memory: bool,
    shared: Collection[str],
) -> fleet.Workload:
    job = members[0]
    may = frozenset.intersection(*(allowed(member, policy, shared) for member in members)) or frozenset((fleet.WAIT,))
    ends = [member.ends for member in members if member.ends and (member.limit or 0) < _A_YEAR]
    requires = {f"partition.{job.partition}": ("true",)} if job.partition and "," not in job.partition else {}
    constraint = own_constraint(job)
    if _SIMPLE.fullmatch(constraint):
        requires.update((f"feature.{feature}", ("true",)) for feature in constraint.split("&"))
    return fleet.Workload(
        name=name,
        members=tuple(
            fleet.Member(node, {k: v for k, v in member.resources.items() if memory or k != "memory"})
            for member in members
            for node in member.nodes
            if node in nodes
        ),
        kind="job",
        owner=job.user,
        may=may,
        backends=("slurm",) if fleet.MOVE in may else (),
        remaining=max(0.0, max(ends) - now) if len(ends) == len(members) else None,
        at_risk=max(member.used for member in members),
        requires=requires,
    )


_NOT_FOR_ROOM = ("Dependency", "BeginTime", "JobHeld", "Assoc", "QOS", "Licenses", BAD_CONSTRAINTS, "Partition")
"""How the reasons of jobs begin that would not start if GPUs were free."""


def _queue(jobs: Sequence[Job], nodes: Mapping[str, Node]) -> dict[str, fleet.Demand]:
    """By the type that Slurm gives GPUs; by an empty name where it gives them none."""
    models: dict[str, str] = {}
    for node in nodes.values():
        if node.model:
            for partition in node.partitions:
                models.setdefault(partition, node.model)
    found: dict[str, fleet.Demand] = {}
    for job in jobs:
        if job.state != "PENDING" or job.held or job.reason.startswith(_NOT_FOR_ROOM):
            continue
        gpus = fleet.gpus_of(job.resources) * job.width * job.tasks
        if gpus:
            model = job.model or models.get(job.partition.partition(",")[0], "")
            limit = job.limit if job.limit and job.limit < _A_YEAR else 0.0
            found[model] = found.get(model, fleet.Demand()).and_also(fleet.Demand(gpus, 0.0, limit, limit))
    return found
