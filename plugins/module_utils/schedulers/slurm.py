# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Slurm cluster, by its own commands.

A node is taken out of service by draining it, with a reason that names the run; only a drain with such a reason is ever
lifted. Exit statuses and messages differ between releases, so every change is followed by a read, and the read decides.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Snapshot, uncollected
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm_jobs
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import (
    Evacuated,
    Fate,
    Mark,
    NodeResult,
    Scheduler,
    SchedulerError,
    State,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_commands import Commands, each, refusal
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_evacuation import Evacuation, look_at
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_jobs import Policy, our_run
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_text import Node, gpus_missing

QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
"""Run on a node to prove it, unless the user names another command; prints the driver's version once a GPU."""

_REBOOTED = "Node unexpectedly rebooted"
"""Slurm's reason for taking down a node that was in service when it learnt of its reboot. One that rebooted while it
was drained is treated so too, if its slurmd had not been heard of when it was resumed."""
_POLL = 2.0
_NO_TIME = "was not proven in time; validate it again with more time"


@dataclass(frozen=True)
class Settings:
    """``versions`` maps nodes to their loaded driver versions, kept as the feature ``driver-<version>`` of each.
    ``command`` proves a node and ``srun_options`` are given to the srun that runs it, in ``partition`` (default: the
    node's first). ``notify`` is run once for each job that something is done about, with ``{job}``, ``{user}``,
    ``{nodes}`` and ``{message}`` replaced."""

    policy: Policy = field(default_factory=Policy)
    versions: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    srun_options: Sequence[str] = ()
    partition: str = ""
    notify: Sequence[str] = ()


class Slurm(Scheduler):
    """The cluster that ``commands`` speak to. ``clock`` gives Unix seconds."""

    def __init__(
        self,
        commands: Commands,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.time,
        look: Callable[[str], str] = look_at,
    ) -> None:
        self._slurm = commands
        self._set = settings or Settings()
        self._clock = clock
        self._jobs = Evacuation(commands, self._set.policy, self._set.notify, clock, look)

    @uncollected()
    def snapshot(self, names: Sequence[str]) -> Snapshot:
        nodes = self._slurm.nodes()
        ours = {name: run for name, node in nodes.items() if (run := our_run(node))}
        return slurm_jobs.snapshot(
            nodes, self._slurm.jobs(), self._slurm.reservations(), names, ours, self._clock(), self._set.policy
        )

    def addresses(self) -> dict[str, str]:
        return {name: node.address for name, node in self._slurm.nodes().items() if node.address not in ("", name)}

    # ---- out of service and back

    def cordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        reason = _reason(mark)
        known = self._slurm.nodes()
        before = {name: _state(known[name]) for name in nodes if name in known}
        maintained = slurm_jobs.maintained(self._slurm.reservations())
        taken = {name: maintained[name] for name, state in before.items() if name in maintained and not state.cordoned}
        wanted = State(True, True, mark.run_id)
        todo = [
            name
            for name, state in before.items()
            if state != wanted and (state.ours or not state.cordoned) and name not in taken
        ]
        after = dict.fromkeys(todo, wanted)
        said = unset = ""
        if not check:
            unset = self._set_features(known, self._set.versions)
            if todo:
                answer = self._slurm.update_nodes(todo, "state=drain", f"reason={reason}")
                said = answer.describe() if answer.ok else refusal(answer)
                after = {name: _state(node) for name, node in self._slurm.nodes(todo).items()}
            # only of nodes that are closed: one whose proof was cut short may be open but for that
            self._forget_proofs([name for name, was in before.items() if after.get(name, was).cordoned])

        def result(name: str) -> NodeResult:
            if name not in known:
                return NodeResult(None, None, failed=True, msg=_unknown(name))
            was, now = before[name], after.get(name, before[name])
            if name in taken:
                msg = f"{name} is in the maintenance reservation {taken[name]} of somebody else; leave it out, or see: "
                return NodeResult(was, was, failed=True, msg=f"{msg}scontrol show reservation {taken[name]}")
            if name not in after:
                left = f"{name} was out of service before ({_why_out(known[name])}); it will be left so"
                return NodeResult(was, was, msg="" if was.ours else left)
            if now != wanted:
                return NodeResult(was, now, changed=now != was, failed=True, msg=f"{name} is {now.describe()}: {said}")
            note = f"moved work is not bound to its driver, the features could not be set: {unset}" if unset else ""
            return NodeResult(was, now, changed=now != was, msg=note)

        return {name: result(name) for name in dict.fromkeys(nodes)}

    def uncordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        known = self._slurm.nodes()
        before = {name: _state(known[name]) for name in nodes if name in known}
        ours = [name for name, state in before.items() if state.ours]
        proofs = self._slurm.reservations()
        unproven = {
            name: "is in service under our reservation: it is being proven, or a proof was cut short; if none runs: "
            "drain it (node_cordon), prove it (node_validate), and then put it back"
            for name, state in before.items()
            if not state.cordoned and _reservation(name) in proofs
        }
        if check:
            back, broken = ours, unproven
        else:
            self._set_features(known, self._set.versions)
            back, broken = self._fit(ours, self._clock() + self._slurm.timeout)
            self._forget_proofs(back)
            if back:
                self._jobs.before_return(back)
            broken.update(self._resume(back, self._clock() + self._slurm.timeout))
            broken.update(unproven)
            broken.update({name: _unfit(known[name]) for name in before if "INVALID_REG" in known[name].state})
        results = {}
        for name in dict.fromkeys(nodes):
            if name not in known:
                results[name] = NodeResult(None, None, failed=True, msg=_unknown(name))
            elif name in broken:
                was = before[name]
                results[name] = NodeResult(was, was, failed=True, msg=f"{name} {broken[name]}")
            elif name in back:
                results[name] = NodeResult(before[name], State(False), changed=True)
            else:
                left = (
                    f"{name} was not taken out of service by this collection ({_why_out(known[name])}); it is left so"
                )
                results[name] = NodeResult(before[name], before[name], msg=left if before[name].cordoned else "")
        return results

    def _fit(self, names: Sequence[str], end: float) -> tuple[list[str], dict[str, str]]:
        """Of nodes that we drained, those that can be put to work now, and what is wrong with the others. A slurmd that
        has just been started is waited for until ``end``."""
        while names:
            seen = self._slurm.nodes(names)
            silent = [name for name in names if seen[name].silent]
            if not silent or self._clock() >= end:
                wrong = {name: text for name in names if (text := _unfit(seen[name]))}
                return [name for name in names if name not in wrong], wrong
            self._slurm.sleep(_POLL / 2)
        return [], {}

    def _resume(self, wanted: Sequence[str], end: float) -> dict[str, str]:
        """Lift our drain and wait until the nodes answer; what is wrong with those that do not. A node is silent for
        a second after that even if all is well."""
        seen = self._slurm.nodes(wanted) if wanted else {}
        names = [name for name in wanted if our_run(seen[name])]
        taken = {
            name: f"was drained by somebody else meanwhile ({_why_out(seen[name])}); it is left so"
            for name in wanted
            if name not in names
        }
        return {**taken, **self._wake(names, end)} if names else taken

    def _wake(self, names: Sequence[str], end: float) -> dict[str, str]:
        said = self._slurm.update_nodes(names, "state=resume")
        pause = _POLL / 8
        while True:
            seen = self._slurm.nodes(names)
            waiting = [name for name in names if seen[name].out or seen[name].silent]
            if not waiting:
                return {}
            booted = [name for name in waiting if not seen[name].drain and seen[name].reason.startswith(_REBOOTED)]
            if booted:
                said = self._slurm.update_nodes(booted, "state=resume")
            if self._clock() >= end or not said.ok:
                if not said.ok:
                    return {name: f"was not resumed: {refusal(said)}" for name in waiting}
                return {
                    name: f"is {'+'.join(sorted(seen[name].state))} after it was resumed; "
                    f"see on it: systemctl status slurmd; then: scontrol update nodename={name} state=resume"
                    for name in waiting
                }
            self._slurm.sleep(pause)
            pause = min(_POLL, pause * 2)

    # ---- features

    def _set_features(self, known: Mapping[str, Node], versions: Mapping[str, str]) -> str:
        """Bring the nodes' features in step with ``versions``: they are lost whenever slurmctld reads its configuration
        again. Returns what could not be set and why, or an empty text."""
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for name, version in versions.items():
            node = known.get(name)
            if node is None or not version:
                continue
            wanted = slurm_jobs.features_with(node, version)
            if (set(wanted[0]), set(wanted[1])) != (set(node.available), set(node.active)):
                groups.setdefault(wanted, []).append(name)
        wrong = []
        for (available, active), names in groups.items():
            said = self._slurm.update_nodes(
                names, f"availablefeatures={','.join(available)}", f"activefeatures={','.join(active)}"
            )
            if not said.ok:
                wrong.append(said.describe())
        return "; ".join(wrong)

    # ---- emptying

    def evacuate(
        self,
        nodes: Sequence[str],
        mark: Mark,
        fates: Sequence[Fate],
        deadline: float,
        patience: float,
        check: bool = False,
    ) -> dict[str, Evacuated]:
        _reason(mark)  # a run that could not have drained a node cannot have noted anything in a job either
        known = self._slurm.nodes()
        names = [name for name in dict.fromkeys(nodes) if name in known]
        emptied = self._jobs.empty(names, mark, fates, deadline, patience, check) if names else {}
        return {**emptied, **{name: Evacuated(failed=True, msg=_unknown(name)) for name in nodes if name not in known}}

    # ---- proof

    def validate(
        self, nodes: Sequence[str], mark: Mark, gpus: Mapping[str, int], timeout: float, check: bool = False
    ) -> dict[str, NodeResult]:
        end = self._clock() + timeout
        known, proofs = self._slurm.nodes(), self._slurm.reservations()
        before = {name: _state(known[name]) for name in nodes if name in known}
        found = [name for name in before if known[name].drain and gpus_missing(known[name].reason)]
        ours = [name for name, state in before.items() if state.ours or name in found]
        wrong: dict[str, str] = {}
        if not check:
            self._take_back([name for name in found if "INVALID_REG" not in known[name].state], mark)
            fit, wrong = self._fit(ours, end)
            wrong.update(
                (name, f"has {gpus[name]} GPUs, and Slurm is configured for {_count(known[name])}; mend gres.conf")
                for name in fit
                if gpus.get(name) and _count(known[name]) != gpus[name] and not _partitioned(known[name])
            )
            wrong.update(self._prove([name for name in fit if name not in wrong], known, mark, end))
        results = {}
        for name in dict.fromkeys(nodes):
            if name not in known:
                results[name] = NodeResult(None, None, failed=True, msg=_unknown(name))
                continue
            state, msg = before[name], f"{name} {wrong[name]}" if name in wrong else ""
            if name not in ours:
                if state.cordoned:
                    msg = f"{name} was drained by somebody else ({_why_out(known[name])}), so no job was run there"
                elif _reservation(name) in proofs:
                    msg = (
                        f"{name} is being proven by somebody else, or a proof was cut short; if none runs: drain it "
                        "(node_cordon), then validate again"
                    )
                else:
                    msg = f"{name} is in service; it was to be proven before that: drain it, then validate again"
            results[name] = NodeResult(state, state, failed=name in wrong or not state.cordoned, msg=msg)
        return results

    def _take_back(self, names: Sequence[str], mark: Mark) -> None:
        """Drain in our name again what Slurm has drained in its own, from 24.11 on with another reason than ours: it
        saw too few GPUs, as it does of a slurmd that started without the driver. It no longer does."""
        if names:
            self._slurm.update_nodes(names, "state=drain", f"reason={_reason(mark)}")

    def _prove(self, names: Sequence[str], known: Mapping[str, Node], mark: Mark, end: float) -> dict[str, str]:
        """Run a job on each node while a reservation keeps others out, and drain it again; what was wrong. The
        reservation has no end: if we die, the node stays closed until somebody cordons it again or settles."""
        if end - self._clock() < 1:
            return dict.fromkeys(names, _NO_TIME)
        if not names:
            return {}
        who = pwd.getpwuid(os.geteuid()).pw_name
        wrong: dict[str, str] = {}

        def reserve(name: str) -> None:
            said = self._slurm.change(
                "scontrol", "create", "reservation", f"reservationname={_reservation(name)}", "starttime=now",
                "duration=UNLIMITED", f"users={who}", "flags=MAINT,IGNORE_JOBS", f"nodes={name}",
            )  # fmt: skip
            if not said.ok:
                taken = f"; if nobody proves it at this moment: scontrol delete reservationname={_reservation(name)}"
                wrong[name] = f"could not be reserved ({refusal(said)}){taken if _reservation(name) in before else ''}"

        before = self._slurm.reservations()
        each(reserve, names)
        there = self._slurm.reservations()
        reserved = []
        for name in names:
            if name in wrong:
                continue
            found = there.get(_reservation(name))
            if found and name in found.nodes:
                reserved.append(name)
            else:
                wrong[name] = "was reserved, but the reservation is not there; nothing was run on it"
        try:
            wrong.update(self._resume(reserved, end))
            awake = [name for name in reserved if name not in wrong]
            versions: dict[str, str] = {}
            for name, proof in zip(awake, each(lambda name: self._run_on(known[name], end), awake)):
                versions.update({name: proof.version} if proof.version else {})
                wrong.update({name: proof.wrong} if proof.wrong else {})
        finally:
            wrong.update(self._close(reserved, mark))
        self._set_features(self._slurm.nodes(reserved) if reserved else {}, versions)
        return wrong

    def _close(self, names: Sequence[str], mark: Mark) -> dict[str, str]:
        """Drain again, and only then end the reservations: a node whose drain did not come true stays reserved."""
        if not names:
            return {}
        before = self._slurm.nodes(names)
        # one that somebody else drains while it is proven keeps that person's reason
        open_ = [name for name in names if not before[name].drain]
        said = self._slurm.update_nodes(open_, "state=drain", f"reason={_reason(mark)}") if open_ else None
        seen = self._slurm.nodes(names)
        closed = [name for name in names if seen[name].drain]
        self._forget_proofs(closed)
        why = said.describe() if said else "nothing was to be done"
        return {name: f"could not be drained again: {why}" for name in names if name not in closed}

    def _run_on(self, node: Node, end: float) -> _Proof:
        left = end - self._clock()
        if left < 1:
            return _Proof(wrong=_NO_TIME)
        seconds = str(int(min(30, left)) or 1)
        partition = self._set.partition or (node.partitions[0] if node.partitions else "")
        said = self._slurm.start(
            [
                "srun", f"--immediate={seconds}", f"--reservation={_reservation(node.name)}", f"--nodelist={node.name}",
                "--nodes=1", "--ntasks=1", "--chdir=/", "--job-name=gpufleet-validate", f"--time={int(left) // 60 + 1}",
                *([f"--partition={partition}"] if partition else []),
                *([f"--gres=gpu:{_count(node)}"] if _count(node) else []),
                *self._set.srun_options,
                *(self._set.command or QUERY),
            ],
            left,
        )  # fmt: skip
        if not said.ok:
            where = f" in partition {partition} (validation_partition)" if partition else ""
            return _Proof(wrong=f"did not run a job{where}: {said.describe()}")
        if self._set.command:
            return _Proof()
        lines = said.stdout.split()
        if len(set(lines)) != min(1, _count(node)) or (len(lines) != _count(node) and not _partitioned(node)):
            return _Proof(
                wrong=f"showed a job the driver versions {lines}, expected one version {_count(node)} times; "
                f"see on it: nvidia-smi"
            )
        return _Proof(version=lines[0] if lines else "")

    def _forget_proofs(self, names: Collection[str]) -> list[str]:
        """End the reservations that a proof of these nodes made, also one that was cut short; which there were."""
        there = self._slurm.reservations() if names else {}
        stale = [_reservation(name) for name in names if _reservation(name) in there]
        each(lambda name: self._slurm.change("scontrol", "delete", f"reservationname={name}"), stale)
        return stale

    # ---- the end

    def settle(self, mark: Mark, check: bool = False) -> list[str]:
        done: list[str] = []
        refused: list[str] = []
        if self._set.versions and not check:
            # a slurmctld that was started again since the last batch has forgotten them
            self._set_features(self._slurm.nodes(), self._set.versions)
        for name, reservation in self._slurm.reservations().items():
            if not name.startswith(slurm_jobs.RESERVATION) or reservation.nodes != (name[len("gpufleet-") :],):
                continue
            node = self._slurm.nodes(reservation.nodes)[reservation.nodes[0]]
            acts: list[Sequence[str]] = [("scontrol", "delete", f"reservationname={name}")]
            if not node.out:
                # a proof was cut short: nobody knows whether the node is fit, so it does not go to work
                drain = ("scontrol", "update", f"nodename={node.name}", "state=drain", f"reason={_reason(mark)}")
                acts.insert(0, drain)
            wrong = "" if check else self._first_refused(acts)
            (refused if wrong else done).append(f"reservation {name}" + (f": {wrong}" if wrong else ""))
        of_jobs, refused_of_jobs = self._jobs.settle(check)
        done, refused = done + of_jobs, refused + refused_of_jobs
        if refused:
            raise SchedulerError(
                f"could not be taken away: {'; '.join(refused)}" + (f". Taken away: {'; '.join(done)}" if done else "")
            )
        return done

    def _first_refused(self, acts: Sequence[Sequence[str]]) -> str:
        for words in acts:
            said = self._slurm.change(*words)
            if not said.ok:
                return refusal(said)
        return ""

    def doubtful(self) -> list[str]:
        jobs = self._slurm.jobs(each_task=True)
        return slurm_jobs.held_by_nobody(jobs) + slurm_jobs.still_bound(jobs)


def with_options(run: Runner, options: Mapping[str, Any]) -> Slurm:
    """The backend as ``options`` (a module's ``scheduler_options``) want it.

    :raises SchedulerError: if the configuration that they name is not there.
    """
    if options["slurm_conf"] and not Path(options["slurm_conf"]).is_file():
        raise SchedulerError(f"slurm_conf is {options['slurm_conf']}, and there is no such file on this machine")
    policy = Policy(options["interactive_jobs"], options["no_requeue_jobs"], options["save_timeout"])
    settings = Settings(
        policy,
        versions=options["versions"],
        command=options["validation_command"],
        srun_options=options["srun_options"],
        partition=options["validation_partition"],
        notify=options["notify_command"],
    )
    return Slurm(Commands(run, options["timeout"], options["slurm_conf"], options["slurm_bin"]), settings)


@dataclass(frozen=True)
class _Proof:
    version: str = ""
    wrong: str = ""


def _reason(mark: Mark) -> str:
    if not re.fullmatch(r"[\w.:+-]+", mark.run_id):
        raise SchedulerError(
            f"the run id {mark.run_id!r} is to name the run in Slurm: take letters, digits and . : + -"
        )
    return f"gpufleet: NVIDIA driver upgrade, run={mark.run_id}"


def _state(node: Node) -> State:
    run = our_run(node)
    return State(node.out, run is not None, run)


def _why_out(node: Node) -> str:
    who = f" by {node.reason_by}" if node.reason_by else ""
    return f"{'+'.join(sorted(node.state))}{who}" + (f": {node.reason}" if node.reason else "")


def _unknown(name: str) -> str:
    return f"Slurm knows no node {name}; see its names: sinfo -N. Nothing was done about it"


def _unfit(node: Node) -> str:
    missing = gpus_missing(node.reason)
    if missing or "INVALID_REG" in node.state:
        found = f" ({missing[0]} GPUs of {missing[1]})" if missing else ""
        return f"has less than Slurm is configured for{found}; see on it: slurmd -C; ls /dev/nvidia*"
    if node.silent:
        return "does not answer Slurm; see on it: systemctl status slurmd"
    return ""


def _count(node: Node) -> int:
    return sum(node.gres.values())


def _partitioned(node: Node) -> bool:
    """Slurm then counts MIG instances, and the machine GPUs."""
    return any(name.startswith("mig-") for name in node.gres)


def _reservation(name: str) -> str:
    """One name a node, so that two cannot prove the same node at the same time."""
    return f"{slurm_jobs.RESERVATION}{name}"
