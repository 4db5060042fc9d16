# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The order of a move between two nodes, told to both by whoever reaches both.

Nothing is remembered here: every call may be repeated, and the nodes say how far they are. So whoever conducts may die
after any call, and the next one goes on. The source is ended only after its save lies whole on a node that has looked
at it and kept a place; a second target is tried only after the first has proven that nothing runs there.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_FROZEN,
    SOURCE_GONE,
    SOURCE_LOST,
    SOURCE_RUNNING,
    SOURCE_UNKNOWN,
    Reason,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.facts import MAP_SINCE, maps_gpus

MOVED, SAVED, STAYED, COLD = "moved", "saved", "stayed", "cold_start"
ABSENT, UNKNOWN, LOST = "absent", "unknown", "lost"
"""How a workload is afterwards: it runs on another node; has saved itself and runs on here; runs on here unsaved; was
ended and started again from its own state. It was not running here; it may run, or stand still, on a node that does
not answer or could not say; it does not run here and cannot be started."""

Call = Callable[[str, str, Mapping[str, Any]], Mapping[str, Any]]
"""Node, module and its options → the module's result, also if it failed. Raises :class:`NodeLost`."""

Differences = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[Any]]


_LOOK = "ansible NODE -m gpufleet.driver.checkpoint_info"


class NodeLost(Exception):
    """A node does not answer."""


@dataclass
class Outcome:
    """What became of one workload. ``to`` is where it runs if that is another node; ``reasons`` tell, in the order they
    came up, why something better did not succeed."""

    workload: str
    how: str
    to: str | None = None
    reasons: list[Mapping[str, Any]] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
    """For which it stood still."""
    kept: str = ""
    """Id of a save that stays where it was made, as the work did not go on from it."""
    next: str = ""
    """The command that looks whether it could, while it is kept."""
    progress: list[float] = field(default_factory=list)
    """The number that grows, if one is declared: before it was saved, and at each look since it came back."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Terms:
    """``shared``: all nodes see the same store. ``patience``: seconds to wait for a target that stops answering.
    ``options`` go to every module (store, state_dir …), ``capture`` and ``restore`` to those of that side."""

    shared: bool = False
    patience: float = 120.0
    gang: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    capture: Mapping[str, Any] = field(default_factory=dict)
    restore: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Job:
    given: Mapping[str, Any]
    outcome: Outcome
    fits: list[str]
    artefact: str = ""
    digest: str = ""
    source: str = SOURCE_RUNNING
    target: str | None = None
    began: float | None = None
    begun: bool = False
    """Whether an interrupted run has saved it."""
    absent: bool = False
    """Whether the target it was given to has proven that it does not run there."""
    visited: set[str] = field(default_factory=set)
    over: bool = False

    @property
    def name(self) -> str:
        return str(self.given["name"])

    @property
    def order(self) -> dict[str, Any]:
        return {**self.given, "artefact": self.artefact, "digest": self.digest}


def other_gpus(own: Mapping[str, Any], offer: Mapping[str, Any]) -> list[str]:
    """Why the GPUs of another node cannot take part, by what ``checkpoint_info`` tells of both: those that a process
    was saved with must be there, or the driver must take a map to others."""
    missing = {one["uuid"] for one in own["gpus"]} - {one["uuid"] for one in offer["gpus"]}
    if not missing or maps_gpus(own["facts"].get("driver")):
        return []
    driver = own["facts"].get("driver")
    return [
        f"{sorted(missing)[0]} is not there, and driver {driver} restores to no other (as {MAP_SINCE} and later do)"
    ]


def _encrypted(given: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For whom workloads are encrypted, each once."""
    found: list[Mapping[str, Any]] = []
    for one in given:
        encrypt = one["save"].get("encrypt")
        if encrypt and encrypt not in found:
            found.append(encrypt)
    return found


def _closed(job: _Job, encrypted: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> str:
    """Why a node cannot decrypt the save of a workload, by what ``checkpoint_info`` says of ``encrypted``."""
    encrypt = job.given["save"].get("encrypt")
    return str(told["cannot_decrypt"][encrypted.index(encrypt)]) if encrypt else ""


class Move:
    """One node's workloads on their way to others. ``say`` tells a person what happens."""

    def __init__(
        self,
        home: str,
        call: Call,
        terms: Terms,
        differences: Differences,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._home = home
        self._call = call
        self._terms = terms
        self._differences = differences
        self._say = say
        self._now, self._sleep = now, sleep

    def away(self, workloads: Sequence[Mapping[str, Any]], candidates: Sequence[str]) -> list[Outcome]:
        """Save the workloads, and bring those that can move to the first of ``candidates`` that takes each.

        :raises NodeLost: if the node that has the work does not answer; a timer on it lets the work go on.
        """
        jobs, moving = self._sort_out(workloads)
        self._find_targets(moving, candidates)
        self._capture([job for job in jobs if not job.over])
        promised = [job.target for job in moving if job.target]
        for target in dict.fromkeys([*promised, *candidates]):
            self._try(target, [job for job in moving if not job.over and target in {*job.fits, job.target}])
        # nobody could bring these back; where they were saved, nothing has changed yet
        self._try(self._home, [job for job in moving if not job.over and job.source == SOURCE_GONE])
        self._leave([job for job in moving if not job.over])
        self._clean(moving)
        self._forget([job for job in moving if job.outcome.how == MOVED])
        return [job.outcome for job in jobs]

    def foretell(self, workloads: Sequence[Mapping[str, Any]], candidates: Sequence[str]) -> list[Outcome]:
        """What :meth:`away` would do, as far as that shows before anything is touched: ``call`` only looks. The node
        that is named is the first with an equal key; whether it has room is known of a save only."""
        jobs, moving = self._sort_out(workloads)
        self._find_targets(moving, candidates)
        asked = [job for job in jobs if not job.over and not job.begun]
        for job, told in self._ask(self._home, "workload_checkpoint", "captured", asked, self._terms.capture):
            if not told["ok"]:
                self._not_captured(job, told)
            job.over, job.outcome.bytes = not told["ok"], told.get("bytes", 0)
        for job in jobs:
            if job.over:
                continue
            if job in moving:
                job.outcome.how, job.outcome.to = MOVED, job.target or job.fits[0]
                self._say(f"{job.name}: would be moved to {job.outcome.to}, {job.outcome.bytes >> 20} MiB")
            else:
                job.outcome.how = SAVED
                self._say(f"{job.name}: would be asked to save itself, and run on until it is stopped")
        return [job.outcome for job in jobs]

    # -- the steps

    def _sort_out(self, workloads: Sequence[Mapping[str, Any]]) -> tuple[list[_Job], list[_Job]]:
        """All workloads, and those that move."""
        jobs = [_Job(given, Outcome(str(given["name"]), STAYED), []) for given in workloads]
        for job in jobs:
            if sum(other.name == job.name for other in jobs) > 1:
                self._stay(job, self._reason(job, "policy", "place", "another workload has its name", "one name each"))
        moving = [job for job in jobs if not job.over and job.given["save"].get("backend", "cuda_criu") == "cuda_criu"]
        for job in jobs:
            backend = job.given["save"].get("backend", "cuda_criu")
            if backend not in ("cuda_criu", "hook"):
                observed = f"backend {backend} moves what a scheduler places"
                expected = "workload_checkpoint and workload_restore around its scheduler's own acts"
                self._stay(job, self._reason(job, "policy", "place", observed, expected))
        return jobs, moving

    def _find_targets(self, jobs: Sequence[_Job], candidates: Sequence[str]) -> None:
        """What has nowhere to go is not touched; what an interrupted run has begun is finished."""
        if not jobs:
            return
        encrypted = _encrypted(job.given for job in jobs)
        own = self._info(self._home, encrypted)
        begun = {one["workload"]: one for one in own["stopped"]}
        offers, refusals = {}, []
        for name in candidates:
            try:
                offers[name] = self._info(name, encrypted)
            except NodeLost as exc:
                refusals.append(f"{name} does not answer ({exc})")
        for name, offer in list(offers.items()):
            lacks = [one["observed"] for one in offer["backends"]["cuda_criu"]["lacks"]]
            wrong = lacks or [str(one) for one in self._differences(own["facts"], offer["facts"])]
            wrong = wrong or other_gpus(own, offer)
            if wrong:
                refusals.append(f"{name}: {wrong[0]}")
                del offers[name]
        for job in jobs:
            record = begun.get(job.name, {})
            waiting = record.get("state") in ("frozen", "published", "committing", "committed")
            job.begun, job.target = waiting, record.get("target") if waiting else None
            job.artefact = record["artefact"] if record.get("state") == "committing" else ""
            if waiting:
                job.fits = list(candidates)
                continue
            closed = {name: trouble for name, offer in offers.items() if (trouble := _closed(job, encrypted, offer))}
            here = _closed(job, encrypted, own)
            for name, trouble in closed.items():
                self._say(f"{job.name}: not to {name}, which cannot decrypt its save: {trouble}")
            job.fits = [] if here else [name for name in offers if name not in closed]
            if here:  # nor could it come home, or be restored here if nobody else can
                self._stay(job, self._no_key(job, self._home, here))
            elif offers and not job.fits:
                self._stay(job, self._no_key(job, *next(iter(closed.items()))))
            elif not job.fits:
                observed = "; ".join(refusals) or "no node is named that could take it in"
                self._stay(job, self._reason(job, "no_target", "place", observed, "a node with an equal key"))

    def _info(self, node: str, encrypted: Sequence[Mapping[str, Any]] = ()) -> Mapping[str, Any]:
        about = {"encrypt": list(encrypted)} if encrypted else {}
        told = self._call(node, "checkpoint_info", {**self._terms.options, **about})
        if told.get("failed"):
            raise NodeLost(str(told.get("msg")))
        return told

    def _no_key(self, job: _Job, node: str, trouble: str) -> Reason:
        encrypt = job.given["save"]["encrypt"]
        given = json.dumps({"encrypt": [encrypt]})
        look = f"ansible {shlex.quote(node)} -b -m gpufleet.driver.checkpoint_info -a {shlex.quote(given)}"
        expected = f"the key of {encrypt['recipient']} on {node}"
        return self._reason(
            job, "key_mismatch:encryption", "place", f"{node} cannot decrypt its save: {trouble}", expected, look
        )

    def _capture(self, jobs: Sequence[_Job]) -> None:
        if not jobs:
            return
        self._say(f"{self._home}: saving {', '.join(job.name for job in jobs)}")
        for job, told in self._ask(
            self._home, "workload_checkpoint", "captured", jobs, {**self._terms.capture, "gang": self._terms.gang}
        ):
            if not told["ok"]:
                self._not_captured(job, told)
                if told["source"] == SOURCE_LOST and (told.get("reason") or {}).get("step") == "commit":
                    self._undying(job)
                elif told["source"] == SOURCE_LOST:  # the driver broke it
                    self._cold(job)
                elif told["source"] == SOURCE_FROZEN:
                    job.source = SOURCE_FROZEN
                    self._leave([job])
                elif told["source"] == SOURCE_UNKNOWN:
                    job.outcome.how, job.outcome.to = UNKNOWN, self._home
                job.over = True
                continue
            job.artefact, job.source, job.target = told["artefact"], told["source"], told.get("target")
            job.digest = told.get("digest", "")
            job.outcome.bytes, job.began = told["bytes"], self._now() - told.get("still", told["seconds"])
            job.outcome.progress = list(told.get("evidence", {}).get("progress", ()))
            if job.source == SOURCE_RUNNING:
                job.outcome.how, job.over = SAVED, True
                self._say(f"{job.name}: has saved itself ({told['evidence'].get('path')})")
            else:
                self._say(f"{job.name}: saved, {job.outcome.bytes >> 20} MiB")

    def _not_captured(self, job: _Job, told: Mapping[str, Any]) -> None:
        if told.get("reason"):
            job.outcome.reasons.append(told["reason"])
        if told["source"] == SOURCE_GONE:
            job.outcome.how = ABSENT
        else:
            self._say(str(told["msg"]))

    def _try(self, target: str, jobs: Sequence[_Job]) -> None:
        """One target: bring, look, end at the source, restore. A save that was given to another is not touched."""
        jobs = [job for job in jobs if job.target in (None, target) or job.absent]
        if not jobs:
            return
        try:
            ready = [job for job in jobs if job.target == target and job.source == SOURCE_GONE]
            fresh = self._prepare(target, [job for job in jobs if job not in ready])
            if self._terms.gang and len(ready) + len(fresh) < len(jobs):
                return
            ready += self._commit(target, fresh)
        except NodeLost as exc:
            self._note(jobs, "no_target", "place", f"{target} does not answer ({exc})", "a node that takes it in")
            return
        if ready:
            self._restore(target, ready)

    def _prepare(self, target: str, jobs: Sequence[_Job]) -> list[_Job]:
        there = []
        for job in jobs:
            job.visited.add(target)
            if self._terms.shared or target == self._home:
                there.append(job)
                continue
            self._say(f"{job.name}: to {target}")
            store = {key: self._terms.options[key] for key in ("store",) if key in self._terms.options}
            order = {**store, "artefact": job.artefact, "source": self._home}
            told = self._call(target, "checkpoint_fetch", order)
            if told.get("failed") and not told.get("lost"):  # what arrived is kept, and only what is wrong comes again
                told = self._call(target, "checkpoint_fetch", order)
            if told.get("failed"):
                self._note([job], "publish_failed", "fetch", str(told.get("msg")), f"the save on {target}")
            else:
                there.append(job)
        fitting = []
        for job, told in self._ask(target, "workload_restore", "prepared", there, self._terms.restore):
            if told["ok"]:
                fitting.append(job)
            else:
                job.outcome.reasons.append(told["reason"])
                self._say(f"{job.name}: not on {target}: {told['msg']}")
        return fitting

    def _commit(self, target: str, jobs: Sequence[_Job]) -> list[_Job]:
        """From here on the work is nowhere but in its save."""
        ended = []
        for state, some in (
            ("committed", [job for job in jobs if job.source == SOURCE_FROZEN]),
            ("reassigned", [job for job in jobs if job.source == SOURCE_GONE]),
        ):
            for job, told in self._ask(self._home, "workload_checkpoint", state, some, {"target": target}):
                if told["ok"]:
                    job.source, job.target, job.absent = SOURCE_GONE, target, False
                    ended.append(job)
                else:
                    job.outcome.reasons.append(told["reason"])
                    job.source, job.over = told["source"], told["source"] != SOURCE_FROZEN
                    if job.source == SOURCE_GONE:  # another run has given it to another node
                        job.outcome.how = UNKNOWN
                    elif job.source == SOURCE_LOST:
                        self._undying(job)
                    elif job.source == SOURCE_UNKNOWN:
                        job.outcome.how, job.outcome.to = UNKNOWN, self._home
                    self._say(str(told["msg"]))
        return ended

    @staticmethod
    def _undying(job: _Job) -> None:
        """It was to end, and is still there: the node is no good. The next run ends it, and goes on with its save."""
        job.outcome.how, job.outcome.kept, job.over = LOST, job.artefact, True
        job.outcome.next = "run it again once its processes are gone"

    def _restore(self, target: str, jobs: Sequence[_Job]) -> None:
        options = {**self._terms.restore, "gang": self._terms.gang}
        try:
            results = self._insist(target, lambda: self._ask(target, "workload_restore", "restored", jobs, options))
        except NodeLost as exc:
            for job in jobs:
                observed = f"{target} stopped answering while {job.name} came back there ({exc})"
                self._note([job], "restore_timeout", "restore", observed, f"an answer of {target}")
                job.outcome.how, job.outcome.to, job.over = UNKNOWN, target, True
            return
        for job, told in results:
            if told["ok"]:
                at_home = target == self._home
                job.outcome.how, job.outcome.to = (STAYED, None) if at_home else (MOVED, target)
                job.over = True
                proof = told.get("evidence", {})
                awake = float(proof.get("awake", 0))
                job.outcome.progress += proof.get("progress", ())
                job.outcome.seconds = round(self._now() - job.began - awake, 1) if job.began else 0.0
                self._say(f"{job.name}: runs on {target}, stood still for {job.outcome.seconds:.0f} s")
                continue
            if told.get("reason"):
                job.outcome.reasons.append(told["reason"])
            self._say(f"{job.name}: did not come back on {target}: {told['msg']}")
            self._prove_absent(job)
            if job.over or not (job.outcome.how == COLD or self._terms.gang):
                continue
            self._cold(job)

    def _prove_absent(self, job: _Job) -> None:
        """See that it does not run where it was given to. What it did there, if it had been let go on, would be done
        twice by another restore: it then starts from its own state."""
        target = str(job.target)
        try:
            told = self._insist(target, lambda: self._ask(target, "workload_restore", "absent", [job], {}))[0][1]
        except NodeLost as exc:
            told = {"ok": False, "msg": str(exc)}
        job.absent = bool(told["ok"]) and not told.get("runs")
        if not job.absent:
            observed = f"{target} did not prove that it does not run there ({told.get('msg', 'it runs')})"
            self._note([job], "restore_failed", "absent", observed, "proof")
            job.outcome.how, job.outcome.to, job.over = UNKNOWN, target, True
        elif told.get("ran"):
            job.outcome.how = COLD

    def _leave(self, jobs: Sequence[_Job]) -> None:
        """Nobody took these: who still stands goes on, who was ended starts from its own state."""
        standing = [job for job in jobs if job.source == SOURCE_FROZEN]
        for job, told in self._ask(self._home, "workload_checkpoint", "aborted", standing, {}):
            job.over = told["source"] != SOURCE_LOST
            self._say(f"{job.name}: {told['source']} on {self._home}")
            if told["source"] not in (SOURCE_RUNNING, SOURCE_LOST):
                self._note(
                    [job], "lost_source", "abort", f"it is {told['source']} on {self._home}", "work that goes on"
                )
                job.outcome.how, job.outcome.to = UNKNOWN, self._home
        for job in jobs:
            if not job.over:
                self._cold(job)

    def _cold(self, job: _Job) -> None:
        if job.target and not job.absent:
            self._prove_absent(job)
        if job.over:
            return
        given_to = {"target": job.target or self._home}
        told = self._ask(self._home, "workload_checkpoint", "returned", [job], given_to)[0][1]
        job.outcome.how, job.over = COLD if told["ok"] else LOST, True
        if told["ok"]:
            self._say(f"{job.name}: starts again on {self._home} from its own state")
            self._keep(job)
        else:
            job.outcome.reasons.append(told["reason"])
            self._say(str(told["msg"]))

    def _keep(self, job: _Job) -> None:
        """Tell of a save that somebody may still want; it expires by itself."""
        if not job.artefact:
            return
        about = {key: job.given[key] for key in ("name", "unit", "container") if job.given.get(key)}
        encrypt = job.given["save"].get("encrypt")
        order = {**about, "artefact": job.artefact, **({"save": {"encrypt": encrypt}} if encrypt else {})}
        given = json.dumps({"state": "prepared", "workloads": [order]})
        job.outcome.kept = job.artefact
        home = shlex.quote(self._home)
        job.outcome.next = f"ansible {home} -b -m gpufleet.driver.workload_restore -a {shlex.quote(given)}"
        self._say(
            f"{job.name}: its save {job.artefact} stays on {self._home}; whether it can be used: {job.outcome.next}"
        )

    def _clean(self, jobs: Sequence[_Job]) -> None:
        """Take copies back from nodes on which the work does not run; what cannot be reached expires by itself. The
        save itself stays for as long as the work may have nothing else, or did not go on from it; a shared one is the
        only copy."""
        for job in jobs:
            kept = job.outcome.how in (UNKNOWN, LOST, COLD)
            if self._terms.shared and kept:
                continue
            for target in sorted(job.visited - {job.outcome.to or "", *([self._home] if kept else ())}):
                try:
                    self._ask(target, "workload_restore", "discarded", [job], {})
                except NodeLost as exc:
                    self._say(f"{job.name}: a copy of its save stays on {target} until it expires: {exc}")

    def _forget(self, jobs: Sequence[_Job]) -> None:
        """The work is well: its save is no longer needed. What is left behind for a lost connection expires."""
        by_target: dict[str, list[_Job]] = {}
        for job in jobs:
            by_target.setdefault(str(job.outcome.to), []).append(job)
        for target, some in by_target.items():
            for node, module in ((target, "workload_restore"), (self._home, "workload_checkpoint")):
                try:
                    self._ask(node, module, "discarded", some, {})
                except NodeLost as exc:
                    self._say(f"the save of {', '.join(job.name for job in some)} stays on {node}: {exc}")

    # -- the way back

    def back(self, taken_in: Sequence[Mapping[str, Any]], only_look: bool = False) -> list[Outcome]:
        """Bring work that was taken in here (records of ``checkpoint_info``) back to the nodes it came from; or say
        what would be done."""
        jobs = []
        for record in taken_in:
            given = {"save": {}, **record["declared"], "name": record["workload"]}
            jobs.append(_Job(given, Outcome(str(record["workload"]), STAYED), [str(record["home"])]))
        self._look_home([job for job, record in zip(jobs, taken_in) if record["state"] == "running"])
        for job in jobs:
            if job.over:
                continue
            home = job.fits[0]
            if only_look:
                job.outcome.how, job.outcome.to = MOVED, home
                self._say(f"{job.name}: would be stopped, and started on {home}, where it came from")
                continue
            began = self._now()
            self._say(f"{job.name}: from {self._home} back to {home}")
            told = self._ask(self._home, "workload_checkpoint", "left", [job], {"node": self._home})[0][1]
            if not told["ok"]:
                job.outcome.reasons.append(told["reason"])
                if told["source"] in (SOURCE_LOST, SOURCE_UNKNOWN):
                    job.outcome.how = LOST if told["source"] == SOURCE_LOST else UNKNOWN
                    job.outcome.to = None if told["source"] == SOURCE_LOST else self._home
                continue
            job.artefact, job.digest = told["artefact"], told.get("digest", "")
            try:
                fetched: Mapping[str, Any] = {}
                if not self._terms.shared:
                    store = {key: self._terms.options[key] for key in ("store",) if key in self._terms.options}
                    fetched = self._call(
                        home, "checkpoint_fetch", {**store, "artefact": job.artefact, "source": self._home}
                    )
                if fetched.get("failed"):
                    self._note([job], "publish_failed", "fetch", str(fetched.get("msg")), f"the files on {home}")
                    started: Mapping[str, Any] = {"ok": False}
                else:
                    started = self._ask(home, "workload_restore", "home", [job], self._terms.restore)[0][1]
                if started["ok"]:
                    job.outcome.how, job.outcome.to = MOVED, home
                    job.outcome.bytes = told.get("bytes", 0)
                    job.outcome.progress = list(started.get("evidence", {}).get("progress", ()))
                    job.outcome.seconds = round(self._now() - began, 1)
                    self._ask(home, "workload_restore", "discarded", [job], {})
                    self._ask(self._home, "workload_checkpoint", "discarded", [job], {})
                    continue
                job.outcome.reasons += [started["reason"]] if started.get("reason") else []
                absent = self._ask(home, "workload_restore", "absent", [job], {})[0][1]
                if not absent["ok"] or absent.get("runs"):
                    seen = f"{home} did not prove that it does not run there ({absent.get('msg', 'it runs')})"
                    self._note([job], "restore_failed", "absent", seen, "proof")
                    job.outcome.how, job.outcome.to = UNKNOWN, home
                    continue
                self._ask(home, "workload_restore", "discarded", [job], {})
            except NodeLost as exc:
                self._note([job], "no_target", "home", f"{home} does not answer ({exc})", "the node it came from")
                job.outcome.how, job.outcome.to = UNKNOWN, home
                continue
            if self._ask(self._home, "workload_checkpoint", "returned", [job], {"target": home})[0][1]["ok"]:
                self._ask(self._home, "workload_checkpoint", "discarded", [job], {})
            job.outcome.how = COLD
        return [job.outcome for job in jobs]

    def _look_home(self, jobs: Sequence[_Job]) -> None:
        """What has no node that answers to go home to, or one that cannot decrypt what it leaves with, stays."""
        encrypted = _encrypted(job.given for job in jobs)
        homes: dict[str, Mapping[str, Any]] = {}
        for home in dict.fromkeys(job.fits[0] for job in jobs):
            try:
                homes[home] = self._info(home, encrypted)
            except NodeLost as exc:
                for job in jobs:
                    if job.fits == [home]:
                        observed = f"{home} does not answer ({exc})"
                        self._stay(job, self._reason(job, "no_target", "home", observed, "the node it came from"))
        for job in jobs:
            closed = "" if job.over else _closed(job, encrypted, homes[job.fits[0]])
            if closed:
                self._stay(job, self._no_key(job, job.fits[0], closed))

    # -- helpers

    def _ask(
        self, node: str, module: str, state: str, jobs: Sequence[_Job], options: Mapping[str, Any]
    ) -> list[tuple[_Job, Mapping[str, Any]]]:
        """A module about several workloads; what it says of each.

        :raises NodeLost: if it says nothing of them.
        """
        if not jobs:
            return []
        orders = [job.order for job in jobs]
        told = self._call(node, module, {**self._terms.options, **options, "state": state, "workloads": orders})
        by_name = {one["workload"]: one for one in told.get("workloads") or ()}
        if told.get("lost") or set(by_name) != {job.name for job in jobs}:
            raise NodeLost(f"{node}: {told.get('msg', 'no answer')}")
        return [(job, by_name[job.name]) for job in jobs]

    def _insist(self, node: str, ask: Callable[[], Any]) -> Any:
        """Ask again for a while: a node may come back, and it knows how far it was."""
        deadline = self._now() + self._terms.patience
        while True:
            try:
                return ask()
            except NodeLost as exc:
                if self._now() >= deadline:
                    raise
                self._say(f"waiting at most {deadline - self._now():.0f} s for {node}: {exc}")
                self._sleep(10.0)

    def _reason(self, job: _Job, reason: str, step: str, observed: str, expected: str, look: str = _LOOK) -> Reason:
        return Reason(reason, step, observed, expected, look, job.source, job.name, self._home)

    def _note(self, jobs: Sequence[_Job], reason: str, step: str, observed: str, expected: str) -> None:
        for job in jobs:
            job.outcome.reasons.append(self._reason(job, reason, step, observed, expected).as_dict())
            self._say(f"{job.name}: {observed}")

    def _stay(self, job: _Job, reason: Reason) -> None:
        job.outcome.reasons.append(reason.as_dict())
        job.over = True
        self._say(str(reason))
