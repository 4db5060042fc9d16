# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Emptying Slurm nodes: wait, or have jobs save themselves, and put them back into the queue.

What is done next about each job is decided in slurm_jobs.py; here it is done, and watched until the nodes are idle.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm_jobs
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import End, Evacuated, Fate, Mark
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_commands import Commands, each
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_jobs import Policy, Step, Token
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_text import Job, Node

POLL = 2.0
"""Seconds between two looks at the cluster."""

SURE = 2
"""Looks in a row that must find a node idle: for some seconds after slurmctld has started one may be wrong."""

MARGIN = 5
"""Seconds that a job is kept off a node longer than its credential is good: clocks differ."""

NO_FILE = "none"


def look_at(path: str) -> str:
    """A file as a short text that changes whenever the file is written or replaced; ``none`` if it is no file or
    empty. The path is a job owner's: nothing is opened, and a link is not followed."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return NO_FILE
    if not stat.S_ISREG(found.st_mode) or not found.st_size:
        return NO_FILE
    return f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}"


@dataclass
class _Watch:
    """What one call has seen and done so far."""

    names: Sequence[str]
    ends: dict[str, list[End]] = field(default_factory=dict)
    waiting: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    idle: Counter[str] = field(default_factory=Counter)
    on: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The workloads seen in the last look, and their nodes among ours."""
    did: dict[str, Step] = field(default_factory=dict)
    notes: dict[str, Token] = field(default_factory=dict)
    """What was last noted about each workload: a site's epilog may write over it in the job."""
    files: dict[str, str] = field(default_factory=dict)
    unreleased: bool = False

    def sure(self, name: str) -> bool:
        return self.idle[name] >= SURE

    def result(self, name: str) -> Evacuated:
        failed = self.failed.get(name, [])
        return Evacuated(
            ends=tuple(self.ends.get(name, ())),
            waiting=() if failed or self.sure(name) else tuple(self.waiting.get(name, ())),
            changed=name in self.changed,
            failed=bool(failed),
            msg=f"{name} cannot be emptied: {'; '.join(failed)}" if failed else "",
        )


class Evacuation:
    """``notify`` is a command run once for each job that something is done about, with ``{job}``, ``{user}``,
    ``{nodes}`` and ``{message}`` replaced. ``clock`` gives Unix seconds."""

    def __init__(
        self,
        commands: Commands,
        policy: Policy,
        notify: Sequence[str],
        clock: Callable[[], float],
        look: Callable[[str], str] = look_at,
    ) -> None:
        self._slurm = commands
        self._policy = policy
        self._notify = notify
        self._clock = clock
        self._look = look

    def empty(
        self,
        names: Sequence[str],
        mark: Mark,
        fates: Sequence[Fate],
        deadline: float,
        patience: float,
        check: bool = False,
    ) -> dict[str, Evacuated]:
        """As :meth:`.base.Scheduler.evacuate`, for ``names`` that Slurm knows."""
        wanted: dict[str, str] = {}
        for fate in fates:
            wanted.setdefault(fate.workload, fate.fate)
        watch = _Watch(names)
        end = self._clock() + patience
        while True:
            nodes, jobs = self._slurm.nodes(names), self._slurm.jobs_with_requeued_tasks()
            if check:
                return self._foretold(names, jobs, wanted, mark, deadline)
            self._look_round(watch, nodes, jobs, wanted, mark, deadline)
            finished = all(watch.sure(name) or name in watch.failed for name in names) and not watch.unreleased
            second_look = any(0 < watch.idle[name] < SURE for name in names)
            if finished or (self._clock() >= end and not second_look):
                return {name: watch.result(name) for name in names}
            self._slurm.sleep(POLL)

    def _foretold(
        self, names: Sequence[str], jobs: Sequence[Job], wanted: Mapping[str, str], mark: Mark, deadline: float
    ) -> dict[str, Evacuated]:
        ends: dict[str, list[End]] = {name: [] for name in names}
        how = {"signal": "requeued", "hold": "requeued", "requeue": "requeued", "cancel": "stopped", "fail": "left"}
        for workload, members in _workloads_on(names, jobs).items():
            step = self._next(members[0], wanted.get(workload, ""), mark, deadline, saved=False)
            for name in _nodes_of(members, names):
                ends[name].append(End(workload, how.get(step.do, "ended"), step.why))
        return {name: Evacuated(tuple(found), changed=bool(found)) for name, found in ends.items()}

    def _look_round(
        self,
        watch: _Watch,
        nodes: Mapping[str, Node],
        jobs: Sequence[Job],
        wanted: Mapping[str, str],
        mark: Mark,
        deadline: float,
    ) -> None:
        found = _workloads_on(watch.names, jobs)
        self._note_ends(watch, found, slurm_jobs.grouped(jobs))
        watch.on = {workload: _nodes_of(members, watch.names) for workload, members in found.items()}
        watch.waiting = {name: [] for name in watch.names}
        watch.failed = {}
        todo: list[tuple[Sequence[Job], Step]] = []
        for workload, members in found.items():
            job = members[0]
            step = self._next(job, wanted.get(workload, ""), mark, deadline, self._saved(watch, job))
            for name in watch.on[workload]:
                text = f"{workload} of {job.user} {step.why}"
                if step.do == "fail":
                    watch.failed.setdefault(name, []).append(f"{workload} of {job.user} still runs and {step.why}")
                else:
                    watch.waiting[name].append(text)
                if step.do not in ("wait", "fail"):
                    watch.changed.add(name)
            if step.do not in ("wait", "fail"):
                todo.append((members, step))
                watch.did[workload] = step
        notes = each(lambda item: self._act(item[0], item[1], mark, nodes), todo)
        watch.notes.update((slurm_jobs.called(members[0]), note) for (members, dummy), note in zip(todo, notes))
        watch.unreleased = self._release(jobs, mark, watch, {name for name in watch.names if nodes[name].drain})
        for name in watch.names:
            self._judge(watch, nodes[name], deadline)

    def _judge(self, watch: _Watch, node: Node, deadline: float) -> None:
        busy, name = node.busy(), node.name
        watch.idle[name] = 0 if busy or watch.waiting[name] or name in watch.failed else watch.idle[name] + 1
        if not node.drain:
            watch.failed.setdefault(name, []).append(
                "somebody put it back into service; drain it again or leave it out of the upgrade"
            )
        elif busy and not watch.waiting[name]:
            watch.waiting[name].append(busy)
            if self._clock() >= deadline:
                watch.failed.setdefault(name, []).append(f"{busy}; see: scontrol show node {name}")
        elif not watch.sure(name) and not watch.waiting[name]:
            watch.waiting[name].append("it looks idle; that is looked at twice")

    def _note_ends(self, watch: _Watch, found: Mapping[str, object], everywhere: Mapping[str, Sequence[Job]]) -> None:
        for workload in watch.on.keys() - found.keys():
            step = watch.did.get(workload)
            left = everywhere.get(workload)
            if left and any(job.state == "PENDING" or job.on_node for job in left):
                end = End(workload, "requeued", step.why if step else "Slurm put it back into the queue")
            else:
                end = End(workload, "stopped" if step and step.do == "cancel" else "ended", step.why if step else "")
            for name in watch.on[workload]:
                watch.ends.setdefault(name, []).append(end)

    def _next(self, job: Job, fate: str, mark: Mark, deadline: float, saved: bool) -> Step:
        return slurm_jobs.next_step(job, fate, self._clock(), deadline, self._policy, mark.run_id, saved)

    def _saved(self, watch: _Watch, job: Job) -> bool:
        """Whether the job's save file is another one than before it was asked, and written to no more."""
        noted = slurm_jobs.token(job.admin_comment)
        path = slurm_jobs.declared(job.comment).saved
        if noted is None or noted.step != "asked" or not path:
            return False
        now = self._look(path)
        before, watch.files[path] = watch.files.get(path), now
        return now not in (NO_FILE, noted.seen) and now == before

    def settle(self, check: bool) -> list[str]:
        """Make the jobs in the queue that bear a note of ours as they were; what was done."""
        end = self._clock() + self._slurm.timeout
        while True:
            noted = [
                (job, found)
                for job in self._slurm.jobs_with_requeued_tasks()
                if (found := slurm_jobs.token(job.admin_comment))
            ]
            # one that we hold comes to the queue only when it has ended on its node
            coming = any(job.on_node and found.step == "held" and job.held for job, found in noted)
            if check or not coming or self._clock() >= end:
                break
            self._slurm.sleep(POLL / 2)
        done = []
        for job, found in noted:
            if job.state != "PENDING":
                continue
            if not check:
                self._free(job, found)
            what = f"constraint {found.feature}" if found.feature else "hold" if found.step == "held" else "note"
            done.append(f"{what} of {slurm_jobs.called(job)} of {job.user}")
        return done

    # ---- what is done to a job; each can be repeated

    def _act(self, members: Sequence[Job], step: Step, mark: Mark, nodes: Mapping[str, Node]) -> Token:
        """What is done to the first component of a heterogeneous job is done to all. Returns what was noted."""
        job = members[0]
        now, off = int(self._clock()), ",".join(dict.fromkeys(node for member in members for node in member.nodes))
        message = f"{off} gets another NVIDIA driver, and this job {step.why}"
        note = Token(mark.run_id, "done", now)
        if step.do == "signal":
            said = slurm_jobs.declared(job.comment)
            note = replace(note, step="asked", seen=self._look(said.saved))
            self._slurm.change("scancel", f"--signal={said.signal}", "--batch", job.id)
            # noted after the signal: a call that dies in between asks once more, which does no harm
            self._tell(job, message, note)
        elif step.do == "hold":
            versions = {slurm_jobs.version_of(nodes[name]) for name in off.split(",") if name in nodes}
            version = versions.pop() if len(versions) == 1 else None
            feature = f"{slurm_jobs.DRIVER_FEATURE}{version}" if version else ""
            if feature and slurm_jobs.bound(job.constraint, feature) is None:
                feature = ""
            was = job.constraint if feature else ""
            note = replace(note, step="held", feature=feature, was=was, off=off)
            # noted before: once it is held, this is how the next call knows to let it go
            self._tell(job, message, note)
            self._slurm.change("scontrol", "requeuehold", "incomplete", job.id)
        elif step.do == "requeue":
            note = replace(note, off=off)
            self._tell(job, message, note)
            if not job.requeue:
                self._slurm.change("scontrol", "update", f"jobid={job.id}", "requeue=1")
            # without "incomplete" a job that has finished meanwhile would run all over again
            self._slurm.change("scontrol", "requeue", "incomplete", job.id)
        else:
            self._tell(job, message, note)
            self._slurm.change("scancel", job.id)
        if self._notify:
            self._slurm.run(_filled(self._notify, job, off, message), timeout=self._slurm.timeout)
        return note

    def _tell(self, job: Job, message: str, noted: Token) -> None:
        """Note in the job how far it is, where its owner reads it too."""
        text = slurm_jobs.with_token(job.admin_comment, message, noted)
        self._slurm.change("scontrol", "update", f"jobid={job.id}", f"admincomment={text}")

    def _release(self, jobs: Sequence[Job], mark: Mark, watch: _Watch, closed: Collection[str]) -> bool:
        """Let the jobs start that are in the queue by our doing; whether one is still on its way there. Only a job
        that cannot come back to a node it was taken off, since those are ``closed``, starts at once."""
        todo, coming = [], False
        for job in jobs:
            noted = slurm_jobs.token(job.admin_comment) or watch.notes.get(slurm_jobs.called(job))
            if noted is None or noted.run != mark.run_id:
                continue
            hurry = bool(noted.off) and set(noted.off.split(",")) <= set(closed)
            if job.state == "PENDING" and (noted.step == "held" or (hurry and job.reason == "BeginTime")):
                todo.append((job, noted, hurry))
            coming = coming or (noted.step == "held" and (job.held or job.state == "COMPLETING"))
        each(lambda item: self._start(*item), todo)
        return coming

    def _start(self, job: Job, noted: Token, hurry: bool) -> None:
        text = job.admin_comment
        if noted.step == "held":
            constraint = slurm_jobs.bound(noted.was, noted.feature) if noted.feature else None
            self._let_go(job, constraint)
            message = "this job was put back into the queue, because its node gets another NVIDIA driver"
            text = slurm_jobs.with_token(text, message, replace(noted, step="done"))
        words = [f"admincomment={text}", *(["starttime=now"] if hurry else [])]
        self._slurm.change("scontrol", "update", f"jobid={job.id}", *words)

    def _free(self, job: Job, noted: Token) -> None:
        """Make a job in the queue as it was before us."""
        if noted.step == "held" or noted.feature:
            self._let_go(job, noted.was if noted.feature else None, held=noted.step == "held")
        text = slurm_jobs.without_token(job.admin_comment)
        self._slurm.change("scontrol", "update", f"jobid={job.id}", f"admincomment={text}")

    def _let_go(self, job: Job, constraint: str | None, held: bool = True) -> None:
        """The note that it is held by us is taken away only after this, so that it is not forgotten in the queue."""
        if constraint is not None:
            self._slurm.change("scontrol", "update", f"jobid={job.id}", f"features={constraint}")
        if held:
            self._slurm.change("scontrol", "release", job.id)

    def keep_off(self, names: Collection[str]) -> None:
        """Before ``names`` go back to work: no job in the queue may come to a node that it was taken off just now."""
        noted = [
            (job, found)
            for job in self._slurm.jobs_with_requeued_tasks()
            if job.state == "PENDING" and (found := slurm_jobs.token(job.admin_comment))
        ]
        near = [(job, found) for job, found in noted if set(found.off.split(",")) & set(names)]
        if not near:
            return
        good = self._slurm.credential_seconds() + MARGIN
        for job, found in near:
            left = found.at + good - int(self._clock())
            if left > 0:
                self._slurm.change("scontrol", "update", f"jobid={job.id}", f"starttime=now+{left}")


def _workloads_on(names: Sequence[str], jobs: Sequence[Job]) -> dict[str, list[Job]]:
    ours = set(names)
    touched = {slurm_jobs.called(job) for job in jobs if job.on_node and ours.intersection(job.nodes)}
    return slurm_jobs.grouped(job for job in jobs if job.on_node and slurm_jobs.called(job) in touched)


def _nodes_of(members: Sequence[Job], names: Sequence[str]) -> tuple[str, ...]:
    ours = set(names)
    return tuple(dict.fromkeys(node for job in members for node in job.nodes if node in ours))


def _filled(command: Sequence[str], job: Job, nodes: str, message: str) -> list[str]:
    values = {"job": job.shown, "user": job.user, "nodes": nodes, "message": message}
    words = []
    for word in command:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        words.append(word)
    return words
