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

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm_jobs
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import End, Evacuated, Fate, Mark
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_commands import Commands, each, refusal
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_jobs import Policy, Step, Token
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_text import Job, Node

POLL = 2.0
"""Seconds between two looks at the cluster."""

SURE = 2
"""Looks in a row that must find the same, a node idle for example: for some seconds after slurmctld has started one may
be wrong, and a node is read a moment before its jobs are."""

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
    stuck: Counter[str] = field(default_factory=Counter)
    """Looks in a row in which a node was busy though no job was on it."""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By workload: looks in a row in which Slurm refused what was to be done, and its words."""
    on: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The workloads seen in the last look, and their nodes among ours."""
    did: dict[str, Step] = field(default_factory=dict)
    notes: dict[str, Token] = field(default_factory=dict)
    """What was last noted about each workload: a site's epilog may write over it in the job."""
    files: dict[str, str] = field(default_factory=dict)
    """The save file of each workload in the last look."""
    unreleased: bool = False

    def sure(self, name: str) -> bool:
        return self.idle[name] >= SURE

    def once_more(self) -> bool:
        """Whether something was seen that must be seen twice."""
        looks = [self.idle[name] for name in self.names] + [self.stuck[name] for name in self.names]
        return any(0 < count < SURE for count in (*looks, *(count for count, dummy in self.refused.values())))

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
        """As :meth:`.base.Scheduler.evacuate`, for ``names`` that Slurm knows. Nothing is done to jobs on nodes that
        are not drained by us; with ``check``, one in service is taken for drained by us."""
        wanted: dict[str, Fate] = {}
        for fate in fates:
            wanted.setdefault(fate.workload, fate)
        watch = _Watch(names)
        end = self._clock() + patience
        while True:
            nodes, jobs = self._slurm.nodes(names), self._slurm.jobs(each_task=True)
            foreign = {name: _whose(nodes[name]) for name in names if not slurm_jobs.our_run(nodes[name])}
            if check:
                foreign = {name: whose for name, whose in foreign.items() if nodes[name].drain}
                return self._foretold(names, jobs, foreign, wanted, mark, deadline)
            self._look_round(watch, nodes, jobs, foreign, wanted, mark, deadline)
            finished = all(watch.sure(name) or name in watch.failed for name in names) and not watch.unreleased
            if finished or (self._clock() >= end and not watch.once_more()):
                return {name: watch.result(name) for name in names}
            self._slurm.sleep(POLL)

    def _foretold(
        self,
        names: Sequence[str],
        jobs: Sequence[Job],
        foreign: Mapping[str, str],
        wanted: Mapping[str, Fate],
        mark: Mark,
        deadline: float,
    ) -> dict[str, Evacuated]:
        ends: dict[str, list[End]] = {name: [] for name in names}
        how = {"signal": "requeued", "hold": "requeued", "requeue": "requeued", "cancel": "stopped", "fail": "left"}
        shared = slurm_jobs.shared_saves(jobs)
        for workload, members in _workloads_on(names, jobs).items():
            on = _nodes_of(members, names)
            noted = slurm_jobs.token(members[0].admin_comment)
            step = self._next(members[0], _word(wanted, workload), mark, deadline, noted, False, shared)
            if all(name in foreign for name in on):
                step = Step("fail", foreign[on[0]])
            for name in on:
                ends[name].append(End(workload, how.get(step.do, "ended"), step.why))
        return {
            name: Evacuated(tuple(found), changed=any(end.how != "left" for end in found))
            for name, found in ends.items()
        }

    def _look_round(
        self,
        watch: _Watch,
        nodes: Mapping[str, Node],
        jobs: Sequence[Job],
        foreign: Mapping[str, str],
        wanted: Mapping[str, Fate],
        mark: Mark,
        deadline: float,
    ) -> None:
        found = _workloads_on(watch.names, jobs)
        self._note_ends(watch, found, slurm_jobs.grouped(jobs))
        watch.on = {workload: _nodes_of(members, watch.names) for workload, members in found.items()}
        watch.waiting = {name: [] for name in watch.names}
        watch.failed = {}
        shared = slurm_jobs.shared_saves(jobs)
        steps: dict[str, Step] = {}
        for workload, members in found.items():
            job, on = members[0], watch.on[workload]
            noted = slurm_jobs.token(job.admin_comment) or watch.notes.get(workload)
            saved = self._saved(watch, job, noted)
            step = self._next(job, _word(wanted, workload), mark, deadline, noted, saved, shared)
            if all(name in foreign for name in on) and step.do != "fail":
                late = self._clock() >= deadline
                step = Step("fail" if late else "wait", f"is left alone: {foreign[on[0]]}")
            steps[workload] = step
        todo = {workload: step for workload, step in steps.items() if step.do not in ("wait", "fail")}
        held = [workload for workload, step in todo.items() if step.do == "hold"]
        versions = self._versions(nodes, {workload: wanted[workload].to or watch.on[workload] for workload in held})
        answers = each(lambda item: self._act(found[item[0]], item[1], mark, versions.get(item[0])), list(todo.items()))
        before, watch.refused = watch.refused, {}
        for (workload, step), (note, refused, untold) in zip(todo.items(), answers):
            if refused:
                count = before.get(workload, (0, ""))[0] + 1
                watch.refused[workload] = (count, refused)
                sure = count >= SURE and self._clock() >= deadline
                steps[workload] = Step("fail" if sure else "wait", f"{step.why}, but Slurm refuses: {refused}")
            else:
                watch.did[workload] = replace(step, why=f"{step.why}{untold}")
                watch.notes[workload] = note
                watch.changed.update(watch.on[workload])
        for workload, step in steps.items():
            text = f"{workload} of {found[workload][0].user} {step.why}"
            for name in watch.on[workload]:
                (watch.failed.setdefault(name, []) if step.do == "fail" else watch.waiting[name]).append(text)
        watch.unreleased = self._release(jobs, mark, watch, {name for name in watch.names if nodes[name].drain})
        for name in watch.names:
            self._judge(watch, nodes[name], deadline)

    def _judge(self, watch: _Watch, node: Node, deadline: float) -> None:
        busy, name = node.busy(), node.name
        known = watch.waiting[name] or name in watch.failed
        watch.idle[name] = 0 if busy or known else watch.idle[name] + 1
        watch.stuck[name] = watch.stuck[name] + 1 if busy and not known else 0
        if not node.drain:
            watch.failed.setdefault(name, []).append(
                "somebody put it back into service; drain it again or leave it out of the upgrade"
            )
        elif watch.stuck[name]:
            watch.waiting[name].append(busy)
            if self._clock() >= deadline and watch.stuck[name] >= SURE:
                watch.failed.setdefault(name, []).append(f"{busy}; see: scontrol show node {name}")
        elif not watch.sure(name) and not known:
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

    def _next(
        self,
        job: Job,
        fate: str,
        mark: Mark,
        deadline: float,
        noted: Token | None,
        saved: bool,
        shared: Collection[str],
    ) -> Step:
        noted = noted if noted and noted.run == mark.run_id else None
        return slurm_jobs.next_step(job, fate, self._clock(), deadline, self._policy, noted, saved, shared)

    def _saved(self, watch: _Watch, job: Job, noted: Token | None) -> bool:
        """Whether the job's save file is another one than before it was asked, and written to no more."""
        path, workload = slurm_jobs.declared(job).saved, slurm_jobs.called(job)
        if noted is None or noted.step != "asked" or not path:
            return False
        now = self._look(path)
        before, watch.files[workload] = watch.files.get(workload), now
        return now not in (NO_FILE, noted.seen) and now == before

    def settle(self, check: bool) -> tuple[list[str], list[str]]:
        """Make the jobs in the queue that bear a note of ours as they were; what was done, and what Slurm refused."""
        end = self._clock() + self._slurm.timeout
        while True:
            jobs = self._slurm.jobs(each_task=True)
            noted = [(job, found) for job in jobs if (found := slurm_jobs.token(job.admin_comment))]
            # one that we hold comes to the queue only when it has ended on its node
            coming = any(job.on_node and found.step == "held" and job.held for job, found in noted)
            if check or not coming or self._clock() >= end:
                break
            self._slurm.sleep(POLL / 2)
        done, refused = [], []
        for job, found in noted:
            if job.state != "PENDING":
                continue
            what = f"constraint {found.feature}" if found.feature else "hold" if found.step == "held" else "note"
            text = f"{what} of {slurm_jobs.called(job)} of {job.user}"
            said = None if check else self._free(job, found)
            if said is None or said.ok:
                done.append(text)
            else:
                refused.append(f"{text}: {refusal(said)}")
        return done, refused

    # ---- what is done to a job; each can be repeated

    def _versions(self, nodes: Mapping[str, Node], goals: Mapping[str, Sequence[str]]) -> dict[str, str | None]:
        """Of work that moves, by where the plan sees room for it, the driver there; None if it is not one for all."""
        known = dict(nodes)
        if not known.keys() >= {name for names in goals.values() for name in names}:
            known.update(self._slurm.nodes())
        found: dict[str, str | None] = {}
        for workload, names in goals.items():
            versions = {slurm_jobs.version_of(known[name]) for name in names if name in known}
            found[workload] = versions.pop() if len(versions) == 1 else None
        return found

    def _act(self, members: Sequence[Job], step: Step, mark: Mark, version: str | None) -> tuple[Token, str, str]:
        """What is done to the first component of a heterogeneous job is done to all; one that is moved is bound to
        nodes with a driver of ``version``. Returns what was noted, what Slurm says if it refuses, and what else went
        wrong."""
        job = members[0]
        now, off = int(self._clock()), ",".join(dict.fromkeys(node for member in members for node in member.nodes))
        message = f"{off} gets another NVIDIA driver, and this job {step.why}"
        before = slurm_jobs.token(job.admin_comment)
        own = job.constraint
        note = Token(mark.run_id, "done", now)
        if before and slurm_jobs.is_bound(job, before):
            # moved before, and still bound to the driver of that time: whatever becomes of it now, that is ours to undo
            own = before.was
            note = replace(note, feature=before.feature, was=before.was)
        if step.do == "signal":
            said = slurm_jobs.declared(job)
            note = replace(note, step="asked", seen=self._look(said.saved))
            answer = self._slurm.signal(job, said.signal)
            # noted after the signal: a call that dies in between asks once more, which does no harm
            if answer.ok:
                self._tell(job, message, note)
            return self._done(answer, job, off, message, note)
        acts: list[tuple[str, ...]]
        if step.do == "hold":
            feature = f"{slurm_jobs.DRIVER_FEATURE}{version}" if version else ""
            if feature and slurm_jobs.bound(own, feature) is not None:
                note = replace(note, feature=feature, was=own)
            note = replace(note, step="held", off=off)
            acts = [("scontrol", "requeuehold", "incomplete", job.id)]
        elif step.do == "requeue":
            note = replace(note, off=off)
            # without "incomplete" a job that has finished meanwhile would run all over again
            acts = [("scontrol", "requeue", "incomplete", job.id)]
            if not job.requeue:
                acts.insert(0, ("scontrol", "update", f"jobid={job.id}", "requeue=1"))
        else:
            acts = [("scancel", job.id)]
        # noted before: once it is held, this is how the next call knows to let it go
        answer = self._tell(job, message, note)
        for words in acts:
            if answer.ok:
                answer = self._slurm.change(*words)
        if not answer.ok and self._runs_on(job):
            self._slurm.change("scontrol", "update", f"jobid={job.id}", f"admincomment={job.admin_comment}")
        elif not answer.ok:
            # it came true all the same, and only the answer was lost; or the job has ended
            answer = replace(answer, rc=0)
        return self._done(answer, job, off, message, note)

    def _runs_on(self, job: Job) -> bool:
        now = [found for found in self._slurm.jobs(each_task=True) if found.id == job.id]
        return any(found.on_node and found.state != "COMPLETING" for found in now)

    def _done(self, answer: Completed, job: Job, off: str, message: str, note: Token) -> tuple[Token, str, str]:
        if not answer.ok:
            return note, refusal(answer), ""
        if not self._notify:
            return note, "", ""
        told = self._slurm.run(_filled(self._notify, job, off, message), timeout=self._slurm.timeout)
        return note, "", "" if told.ok else f"; its owner was not told: {told.describe()}"

    def _tell(self, job: Job, message: str, noted: Token) -> Completed:
        """Note in the job how far it is, where its owner reads it too."""
        text = slurm_jobs.with_token(job.admin_comment, message, noted)
        return self._slurm.change("scontrol", "update", f"jobid={job.id}", f"admincomment={text}")

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
            said = self._let_go(job, constraint)
            if said and not said.ok and noted.feature and noted.feature not in self._features():
                # slurmctld has forgotten it meanwhile: better unbound than held
                constraint = noted.was if slurm_jobs.is_bound(job, noted) else None
                noted = replace(noted, feature="", was="")
                said = self._let_go(job, constraint)
            if said and not said.ok:
                return
            text = self._back(job, replace(noted, step="done"))
        words = [f"admincomment={text}", *(["starttime=now"] if hurry else [])]
        self._slurm.change("scontrol", "update", f"jobid={job.id}", *words)

    def _back(self, job: Job, noted: Token) -> str:
        """The AdminComment of a job that waits in the queue again."""
        message = "this job was put back into the queue, because its node gets another NVIDIA driver"
        if noted.feature:
            message += (
                f"; it waits for nodes with {noted.feature}, and if there are none any more: "
                f"scontrol update jobid={job.shown} features={noted.was}"
            )
        return slurm_jobs.with_token(job.admin_comment, message, noted)

    def _features(self) -> set[str]:
        return {feature for node in self._slurm.nodes().values() for feature in node.active}

    def _free(self, job: Job, noted: Token) -> Completed:
        """Make a job in the queue as it was before us."""
        constraint = noted.was if slurm_jobs.is_bound(job, noted) else None
        said = self._let_go(job, constraint, held=noted.step == "held")
        if said and not said.ok:
            return said
        text = slurm_jobs.without_token(job.admin_comment)
        return self._slurm.change("scontrol", "update", f"jobid={job.id}", f"admincomment={text}")

    def _let_go(self, job: Job, constraint: str | None, held: bool = True) -> Completed | None:
        """The note that it is held by us is taken away only after this, so that it is not forgotten in the queue.
        Returns what Slurm said last, or first refused."""
        said = None
        if constraint is not None:
            said = self._slurm.change("scontrol", "update", f"jobid={job.id}", f"features={constraint}")
        if held and (said is None or said.ok):
            said = self._slurm.change("scontrol", "release", job.id)
        return said

    def before_return(self, names: Collection[str]) -> None:
        """Before ``names`` go back to work, with the features that they have now: no job in the queue may come to one
        that it was taken off just now, or wait for a driver that no node has any more."""
        noted = [
            (job, found)
            for job in self._slurm.jobs(each_task=True)
            if job.state == "PENDING" and (found := slurm_jobs.token(job.admin_comment))
        ]
        self._loosen([(job, found) for job, found in noted if slurm_jobs.is_bound(job, found)])
        self._keep_off(names, noted)

    def _loosen(self, tied: Sequence[tuple[Job, Token]]) -> None:
        features = self._features() if tied else set()
        for job, found in tied:
            if found.feature not in features:
                words = [f"features={found.was}", f"admincomment={self._back(job, replace(found, feature='', was=''))}"]
                self._slurm.change("scontrol", "update", f"jobid={job.id}", *words)
            elif job.reason == slurm_jobs.BAD_CONSTRAINTS:
                # the feature was forgotten for a while; Slurm takes the job up again only if it is told anew
                self._slurm.change("scontrol", "update", f"jobid={job.id}", f"features={job.constraint}")

    def _keep_off(self, names: Collection[str], noted: Sequence[tuple[Job, Token]]) -> None:
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


def _word(wanted: Mapping[str, Fate], workload: str) -> str:
    """What the plan does with a workload, or an empty text."""
    return wanted[workload].fate if workload in wanted else ""


def _whose(node: Node) -> str:
    if not node.drain:
        return f"{node.name} is in service"
    return f"{node.name} is drained by {node.reason_by or 'somebody'} ({node.reason or 'no reason given'}), not by us"


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
