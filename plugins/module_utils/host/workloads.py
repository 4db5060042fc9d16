# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The work on a plain machine: stop it for an upgrade and start it again, by the names its owner gave.

Declared work is a systemd unit or a container. It is never stopped by killing processes: whatever started them would
start them again. GPU processes that nobody declared are waited for before anything declared is touched, so that a
node that cannot be had keeps working.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import NOT_FOUND_RC, Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders, nvml, processes, services
from ansible_collections.gpufleet.driver.plugins.module_utils.host.identity import Owner
from ansible_collections.gpufleet.driver.plugins.module_utils.host.systemd import (
    Hold,
    Systemd,
    Unit,
    in_order,
    to_stop,
    unit_name,
    with_followers,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal

KIND = "workloads"
WAIT, REFUSE, STOP = "wait", "refuse", "stop"
ENGINES = ("podman", "docker")

_GPU_NODE = re.compile(r"/dev/nvidia(\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_QUERY = 30.0
_TRANSIENT = 3.0
"""Seconds after which a process is no passing look at the GPUs, such as a monitor's nvidia-smi."""
_SOON = 0.25
"""Seconds after which work is asked for the second time whether it is ready; then in longer and longer intervals."""
_SETTLE = 10.0
"""Seconds that processes of stopped work may take to let go of the device."""


class WorkloadsError(Exception):
    """The work on this node could not be stopped or started; the text says what, and the next command.

    ``result`` is what was done until then.
    """

    def __init__(self, message: str, result: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.result = dict(result or {})


@dataclass(frozen=True)
class Workload:
    """Work as its owner declares it: a ``unit`` or a ``container``. Times are seconds; ``ready`` is an argument list
    that exits with 0 once the work does what it is for.

    With both, the unit is what is stopped and started, and the container says whose the processes in it are: those of
    a unit that calls ``docker run`` are not in the unit's own cgroup.

    ``elsewhere`` names another host that has the same unit or container: it is started there while it is stopped here.
    ``come_back`` says that it is stopped there and started here again afterwards. ``movable``: it has said how it is
    saved, so that role evacuate moves it if it can.
    """

    name: str
    unit: str | None = None
    container: str | None = None
    engine: str = "podman"
    stop_timeout: float = 60
    ready: tuple[str, ...] = ()
    ready_timeout: float = 120
    elsewhere: str | None = None
    come_back: bool = True
    movable: bool = False
    declared: bool = True


@dataclass(frozen=True)
class Holder:
    """A process that has a GPU open. ``since`` is Unix seconds; ``unit`` a unit of the system; ``container`` the full
    id it runs in. ``management`` says that it watches GPUs rather than computes; ``next`` what would end it.

    ``kind`` and ``part_of`` are the largest thing it is part of, as its owner knows it: a pod, job, container, unit,
    login session, or nothing but the process. ``gpus`` are indices as nvidia-smi counts; ``memory`` is bytes of theirs.
    """

    pid: int
    name: str
    title: str
    next: str
    user: str | None = None
    since: float | None = None
    unit: str | None = None
    container: str | None = None
    management: bool = False
    kind: str = "process"
    part_of: str = ""
    gpus: tuple[int, ...] = ()
    memory: int | None = None

    def describe(self) -> str:
        if self.since is None:
            return self.title
        return f"{self.title} since {datetime.fromtimestamp(self.since, timezone.utc):%Y-%m-%d %H:%M:%SZ}"


def _waiting(others: Sequence[Holder], left: float, undeclared: str) -> str:
    then = "its service or container is stopped" if undeclared == STOP else "this node is given up"
    what = "; ".join(holder.describe() for holder in others)
    return f"waiting for undeclared GPU work to end: {what}. In {left:.0f} s {then}"


def _then_declared(work: Workload) -> str:
    if work.movable:
        return "is saved and moved if a node can take it; if not, it is stopped, and started again afterwards"
    if not work.elsewhere:
        return "is stopped, and started again afterwards"
    back = "and comes back afterwards" if work.come_back else "and stays there"
    return f"is stopped, started on {work.elsewhere} {back}"


def _entry(name: str, kind: str, its: Sequence[Holder]) -> dict[str, Any]:
    """Work by its processes: indices of its GPUs, bytes of their memory (None: unknown), and since when (Unix)."""
    gpus = sorted({gpu for holder in its for gpu in holder.gpus})
    known = [holder.memory for holder in its if holder.memory is not None]
    return {
        "name": name,
        "kind": kind,
        "owner": next((holder.user for holder in its if holder.user), None),
        "gpus": gpus,
        "memory": sum(known) if known else None,
        "since": min((holder.since for holder in its if holder.since is not None), default=None),
        "pids": [holder.pid for holder in its],
        "processes": [holder.describe() for holder in its],
        "next": "; ".join(dict.fromkeys(holder.next for holder in its)),
    }


Census = Callable[[], Sequence[Holder]]


def from_census(
    census: holders.Census, proc: str = "/proc", usage: Mapping[int, nvml.Usage] | None = None
) -> list[Holder]:
    """The processes of a census that hold GPUs, but for those of the system itself: they are no work, and unloading
    the modules has its own answer to them. ``usage`` is what NVML says; without it, a process counts for every GPU
    whose device node it has open."""
    found = []
    for one in census.processes:
        if one.process is None or one.kind in (holders.SYSTEM, holders.KERNEL):
            continue
        owner, user = one.process.owner, one.process.login or one.process.user
        kind, part_of = _part_of(owner, one.container_name, user, f"{one.name} of {user} (PID {one.process.pid})")
        has = (usage or {}).get(one.process.pid)
        opened = sorted(int(match[1]) for match in map(_GPU_NODE.fullmatch, one.devices) if match)
        found.append(
            Holder(
                pid=one.process.pid,
                name=one.name,
                title=one.title,
                next=one.release.advice,
                user=user,
                since=_started(one.process.pid, proc),
                unit=owner.unit if owner.user_unit_of is None else None,
                container=owner.container if owner.user_unit_of is None else None,
                management=one.kind == holders.MANAGEMENT,
                kind=kind,
                part_of=part_of,
                gpus=has.gpus if has else () if usage else tuple(opened),
                memory=has.memory if has else None,
            )
        )
    return found


def _part_of(owner: Owner, container_name: str | None, user: str, alone: str) -> tuple[str, str]:
    """Kind and name of the largest thing a process is part of; ``alone`` is its name if that is nothing."""
    if owner.pod:
        return "pod", f"pod {owner.pod}"
    if owner.job:
        return "job", f"Slurm job {owner.job}"
    whose = "" if owner.user_unit_of is None else f" of user {user}"
    if owner.container:
        return "container", f"container {container_name or owner.container[:12]}{whose}"
    if owner.unit and owner.unit.endswith(".service"):
        return "unit", f"{owner.unit}{whose}"
    if owner.session:
        return "session", f"login session {owner.session} of {user}"
    return "process", alone


def _started(pid: int, proc: str) -> float | None:
    """When a process was started, in Unix seconds (proc(5): ticks since boot in PID/stat, btime in stat)."""
    try:
        ticks = processes.parse_stat(processes.read(f"{proc}/{pid}/stat")).start
        boot = re.search(rb"^btime (\d+)$", processes.read(f"{proc}/stat"), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return int(boot[1]) + ticks / os.sysconf("SC_CLK_TCK") if boot else None


@dataclass(frozen=True)
class Container:
    """A container as ``inspect`` tells it. ``policy`` is its restart policy as ``update --restart`` takes it;
    ``unit`` is the systemd unit that runs it, if one does."""

    id: str
    running: bool
    status: str
    policy: str
    auto_remove: bool
    unit: str | None
    exit_code: int
    error: str


def parse_inspect(text: str) -> Container:
    """The container in what ``podman|docker container inspect NAME`` prints.

    :raises ValueError: if it is not that.
    """
    content = json.loads(text)
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
        raise ValueError("expected a list of one container")
    one = content[0]
    state, host = one.get("State") or {}, one.get("HostConfig") or {}
    restart = host.get("RestartPolicy") or {}
    policy, retries = restart.get("Name") or "no", int(restart.get("MaximumRetryCount") or 0)
    return Container(
        id=str(one["Id"]),
        running=bool(state.get("Running")),
        status=str(state.get("Status", "")),
        policy=f"{policy}:{retries}" if policy == "on-failure" and retries else policy,
        auto_remove=bool(host.get("AutoRemove")),
        unit=((one.get("Config") or {}).get("Labels") or {}).get("PODMAN_SYSTEMD_UNIT") or None,
        exit_code=int(state.get("ExitCode") or 0),
        error=str(state.get("Error") or ""),
    )


class Engine:
    """A container engine's command line."""

    def __init__(self, name: str, run: Runner) -> None:
        self.name = name
        self._run = run

    def inspect(self, container: str) -> Container | None:
        """:raises WorkloadsError: if the engine does not answer; None if it does not know the container."""
        done = self._run([self.name, "container", "inspect", container], timeout=_QUERY)
        if done.rc == NOT_FOUND_RC:
            raise WorkloadsError(f"{self.name} is not installed, so container {container} cannot be looked at")
        if not done.ok:
            if "no such" in done.stderr.lower():
                return None
            raise WorkloadsError(f"{self.name} does not answer ({done.describe()}); is it running?")
        try:
            return parse_inspect(done.stdout)
        except (ValueError, KeyError) as exc:
            raise WorkloadsError(f"{self.name} container inspect {container} printed something else: {exc}") from exc

    def stop(self, container: str, timeout: float) -> Completed:
        return self._run([self.name, "stop", "-t", str(int(timeout)), container], timeout=timeout + _QUERY)

    def start(self, container: str) -> Completed:
        return self._run([self.name, "start", container], timeout=_QUERY * 4)

    def set_policy(self, container: str, policy: str) -> Completed:
        return self._run([self.name, "update", f"--restart={policy}", container], timeout=_QUERY)


@dataclass(frozen=True)
class Found:
    """A workload and how it is now: its ``units`` in the order to start them, or, if it has none, its ``container``."""

    workload: Workload
    units: tuple[Unit, ...] = ()
    container: Container | None = None

    @property
    def present(self) -> bool:
        return any(unit.present for unit in self.units) if self.units else self.container is not None

    @property
    def running(self) -> bool:
        if self.units:
            return any(unit.up for unit in self.units)
        return self.container is not None and self.container.running

    @property
    def state(self) -> str:
        if not self.present:
            return "missing"
        return "running" if self.running else "stopped"

    def owns(self, holder: Holder) -> bool:
        if self.container and holder.container == self.container.id:
            return True
        return any(holder.unit in unit.names for unit in self.units)


def record(found: Found, order: int = 0) -> dict[str, Any]:
    """A workload as it is now, for the journal and for :meth:`Workloads.bring_up`."""
    work = found.workload
    return {
        "order": order,
        "running": found.running,
        "units": [unit.id for unit in found.units if unit.up],
        "container": None if found.units else work.container,
        "engine": work.engine,
        "policy": found.container.policy if found.container else None,
        "ready": list(work.ready),
        "ready_timeout": work.ready_timeout,
        "elsewhere": work.elsewhere,
        "come_back": work.come_back,
        "declared": work.declared,
    }


class Workloads:
    """The work on this node. ``census`` lists the processes that have a GPU open; ``say`` logs what is waited for."""

    def __init__(
        self,
        journal: Journal,
        run: Runner,
        census: Census,
        say: Callable[[str], None],
        extra_units: Sequence[str] = (),
        hold_directory: str = "/etc/systemd/system",
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.journal = journal
        self.run = run
        self.census = census
        self.say = say
        self.platform = {unit_name(name) for name in extra_units}
        self.now, self.monotonic, self.sleep = now, monotonic, sleep
        self.systemd = Systemd(run, sleep, monotonic)
        self.hold = Hold(Path(hold_directory), "Held by gpufleet.driver: this work waits for the node's NVIDIA driver.")

    # -- what is there

    def find(self, workload: Workload) -> Found:
        """How a workload is now; one whose container is run by a systemd unit becomes that unit.

        :raises WorkloadsError: if it cannot be looked at, or would not survive being stopped.
        """
        container = None
        if workload.container:
            if not _NAME.fullmatch(workload.container):
                raise WorkloadsError(f"workload {workload.name}: {workload.container!r} is not the name of a container")
            container = Engine(workload.engine, self.run).inspect(workload.container)
        unit = workload.unit or (container.unit if container else None)
        if unit:
            return Found(workload, self._units(unit_name(unit)), container)
        if container and container.running and container.auto_remove:
            raise WorkloadsError(
                f"workload {workload.name}: container {workload.container} was started with --rm, so stopping it would "
                f"remove it and nothing could start it again; name the unit that runs it too, or run it without --rm"
            )
        return Found(workload, container=container)

    def _units(self, name: str) -> tuple[Unit, ...]:
        units, distance = with_followers(self.systemd, [name])
        first = [unit.id for unit in units.values() if name in unit.names]
        return tuple(units[one] for one in in_order(distance, first))

    def undeclared(self, found: Sequence[Found]) -> list[Holder]:
        """Processes with a GPU open that belong neither to ``found`` nor to the platform's services."""
        return [
            holder
            for holder in self.census()
            if not any(one.owns(holder) for one in found) and not self._of_platform(holder)
        ]

    def _of_platform(self, holder: Holder) -> bool:
        """Whether gpu_services will stop it: known services, those given, other services that only watch, and MPS."""
        if holder.container:
            return False
        if holder.unit and holder.unit.endswith(".service"):
            known = services.is_known(holder.unit) or holder.unit in self.platform
            return known or (holder.management and not services.is_needed(holder.unit))
        return holder.name.startswith("nvidia-cuda-mps")

    def survey(self, declared: Sequence[Workload], wait: float = 0, undeclared: str = WAIT) -> list[dict[str, Any]]:
        """All work on this node that uses GPUs, or was declared, and what :meth:`stop` would do about it.

        :raises WorkloadsError: if declared work cannot be looked at, or would not survive being stopped.
        """
        found = self._find_all(declared)
        everybody = self.census()
        stopped = self.journal.before(KIND) or {}
        work = []
        for one in found:
            known = one.workload
            kind = "unit" if one.units else "container"
            entry = _entry(known.name, kind, [holder for holder in everybody if one.owns(holder)])
            what = one.units[0].id if one.units else known.unit or known.container
            if one.running:
                then = _then_declared(known)
            elif (stopped.get(known.name) or {}).get("running"):
                then = "was stopped by a run that did not end, and is started again afterwards"
            elif one.units and not one.units[0].present:
                then = f"is not there, the node has no {what}"
            else:
                then = "is not running, and left so"
            plans = {
                "may": ["move", "restart"] if known.movable else ["restart"],
                "wait": 0,
                "elsewhere": known.elsewhere,
            }
            work.append({**entry, "declared": True, "what": what, "state": one.state, "then": then, **plans})
        others: dict[tuple[str, str], list[Holder]] = {}
        for holder in everybody:
            if not any(one.owns(holder) for one in found) and not self._of_platform(holder):
                others.setdefault((holder.kind, holder.part_of), []).append(holder)
        for (kind, name), its in others.items():
            then = self._then(its, wait, undeclared)
            entry = {**_entry(name, kind, its), "declared": False, "what": name, "state": "running", "then": then}
            may = ["wait", "restart"] if undeclared == STOP and self._can_stop(its) else ["wait"]
            work.append({**entry, "may": may, "wait": wait, "elsewhere": None})
        return work

    def _then(self, its: Sequence[Holder], wait: float, undeclared: str) -> str:
        """What becomes of work that nobody declared."""
        if undeclared == REFUSE:
            return "is not declared in gpu_workloads, so the node is refused"
        patience = f"is not declared in gpu_workloads: it is waited for, at most {wait:.0f} s, then"
        if undeclared == STOP and self._can_stop(its):
            return f"{patience} it is stopped, and started again afterwards"
        stop = ", set gpu_undeclared=stop" if undeclared == WAIT and self._can_stop(its) else ""
        ways = f"declare it, raise gpu_workload_wait{stop}, or end it before"
        return f"{patience} the node is given up, with its declared work untouched; {ways}"

    def _can_stop(self, its: Sequence[Holder]) -> bool:
        return all(holder.container or self._stoppable(holder) for holder in its)

    def _find_all(self, declared: Sequence[Workload]) -> list[Found]:
        names = [workload.name for workload in declared]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise WorkloadsError(f"workloads declared more than once: {', '.join(twice)}; each needs a name of its own")
        return [self.find(workload) for workload in declared]

    # -- stopping

    def stop(
        self,
        declared: Sequence[Workload],
        wait: float,
        undeclared: str = WAIT,
        check: bool = False,
        waited: float = 0,
        look: float = 0,
    ) -> dict[str, Any]:
        """Free the node of work: wait at most ``wait`` seconds for what nobody declared, then stop what is declared.

        ``undeclared`` says what happens to the former when time is up: an error (WAIT), an error at once (REFUSE), or
        its service or container is stopped too (STOP). ``waited`` of those seconds are over; if ``look`` is not 0, this
        call spends at most so many of the others, and then says that it is waiting.

        :raises WorkloadsError: if work is left on the GPUs. Its result says ``waiting`` if there is time left.
        """
        found = self._find_all(declared)
        began = self.monotonic()
        patience = 0 if check else _TRANSIENT if undeclared == REFUSE else max(0.0, wait - waited)
        others = self._wait_for_others(found, patience, undeclared, look)
        spent = self.monotonic() - began
        result: dict[str, Any] = {
            "waited": round(waited + spent, 1),
            "undeclared": [vars(holder) for holder in others],
            "missing": [one.workload.name for one in found if not one.present],
            "warnings": [],
        }
        if others and not check and spent < patience:
            raise WorkloadsError(_waiting(others, patience - spent, undeclared), {**result, "waiting": True})
        if others and undeclared == STOP:
            more, others = self._owners(others)
            found += more
        if others and (not check or undeclared == REFUSE):
            raise WorkloadsError(self._in_the_way(others, result["waited"]), {**result, "changed": False})
        stopping = [one for one in found if one.running]
        holding = [unit.id for one in found for unit in one.units]
        before = {one.workload.name: one.state for one in found}
        after = {**before, **{one.workload.name: "stopped" for one in stopping}}
        result.update(
            changed=bool(stopping or self.hold.missing(holding)),
            stopped=[one.workload.name for one in stopping],
            workloads=after,
            elsewhere=self._going_elsewhere(found),
            diff={"before": before, "after": after},
        )
        if check:
            return result
        self._remember(found)
        if not result["changed"] and all(self.hold.loaded(unit) for one in found for unit in one.units):
            self._prove_free(patience - spent, result)
            return result
        self.journal.start("stop workloads", self.now())
        try:
            self._stop(found, holding, result)
            self._prove_free(patience - spent, result)
        except WorkloadsError as exc:
            exc.result = result
            self.journal.end("stop workloads", self.now(), state="failed", reason=str(exc))
            raise
        self.journal.end("stop workloads", self.now())
        return result

    def _going_elsewhere(self, found: Sequence[Found]) -> dict[str, str]:
        """Work that runs here, or ran before an interrupted run stopped it, → the host it is to be started on."""
        records = self.journal.before(KIND) or {}
        places = {}
        for one in found:
            known = records.get(one.workload.name) or record(one)
            if known["running"] and known.get("elsewhere"):
                places[one.workload.name] = known["elsewhere"]
        return places

    def _wait_for_others(self, found: Sequence[Found], wait: float, undeclared: str, look: float = 0) -> list[Holder]:
        began = self.monotonic()
        seen: set[int] = set()
        while True:
            others = self.undeclared(found)
            spent = self.monotonic() - began
            left = wait - spent
            if not others or left <= 0 or 0 < look <= spent:
                return others
            if {holder.pid for holder in others} != seen:
                seen = {holder.pid for holder in others}
                self.say(_waiting(others, left, undeclared))
            self.sleep(min(5.0, left, max(1.0, left / 4), look - spent if look else left))

    def _in_the_way(self, others: Sequence[Holder], waited: float) -> str:
        return (
            f"after {waited:.0f} s there is GPU work that nobody declared: "
            f"{'; '.join(holder.describe() for holder in others)}. Nothing was stopped. Declare it in gpu_workloads, "
            f"wait longer, or end it: {'; '.join(dict.fromkeys(holder.next for holder in others))}"
        )

    def _owners(self, others: Sequence[Holder]) -> tuple[list[Found], list[Holder]]:
        """The services and containers that undeclared processes belong to, and the processes that belong to none.

        A login session is not stopped, for its user's other work would go with it; nor is a service that others need.
        """
        found: dict[str, Found] = {}
        orphans = []
        for holder in others:
            owner = None
            if holder.container:
                owner = self._find_container(holder.container)
            elif holder.unit and self._stoppable(holder):
                owner = self.find(Workload(holder.unit, unit=holder.unit, declared=False))
            if owner is None or not owner.running:
                orphans.append(holder)
            else:
                found[owner.workload.name] = owner
        return list(found.values()), orphans

    def _stoppable(self, holder: Holder) -> bool:
        unit = holder.unit or ""
        return unit.endswith(".service") and not services.is_needed(unit)

    def _find_container(self, container: str) -> Found | None:
        for engine in ENGINES:
            try:
                found = self.find(Workload(container[:12], container=container, engine=engine, declared=False))
            except WorkloadsError:
                continue  # not installed or not running: not this engine's
            if found.present:
                return found
        return None

    def _remember(self, found: Sequence[Found]) -> None:
        base = len(self.journal.before(KIND) or {})
        records = {one.workload.name: record(one, base + index) for index, one in enumerate(found)}
        self.journal.remember_each(KIND, records)

    def _stop(self, found: Sequence[Found], holding: Sequence[str], result: dict[str, Any]) -> None:
        """Containers first: the daemon-reload that holds the units takes devices from running ones (their device
        rules are written anew), and they may still want to save their state on the GPU."""
        for one in found:
            if one.container and not one.units:
                self._stop_container(one, result)
        self.hold.place(holding)
        shown = self.systemd.show(holding)
        if not all(self.hold.loaded(unit) for unit in shown.values()):
            self.systemd.reload()
        for one in found:
            self._stop_units(one)

    def _stop_container(self, one: Found, result: dict[str, Any]) -> None:
        work, container = one.workload, one.container
        if container is None or work.container is None:
            return
        engine = Engine(work.engine, self.run)
        if container.policy != "no":
            said = engine.set_policy(work.container, "no")
            if not said.ok:
                result["warnings"].append(
                    f"workload {work.name}: its restart policy {container.policy} could not be suspended "
                    f"({said.describe()}); if the node reboots, {work.engine} may start it before its time"
                )
        if not container.running:
            return
        said = engine.stop(work.container, work.stop_timeout)
        now = engine.inspect(work.container)
        if now is None or now.running:
            raise WorkloadsError(
                f"workload {work.name}: container {work.container} is {now.status if now else 'gone'} instead of "
                f"stopped ({said.describe()}); look at: {work.engine} logs --tail 20 {work.container}"
            )

    def _stop_units(self, one: Found) -> None:
        running = to_stop([unit.id for unit in one.units if unit.up and unit.kind != "target"])
        deadline = self.monotonic() + one.workload.stop_timeout + _QUERY
        for name in running:
            self.systemd.stop(name, timeout=max(1.0, deadline - self.monotonic()))
        left = [unit for unit in self.systemd.show(running).values() if unit.active not in ("inactive", "failed")]
        if left:
            raise WorkloadsError(
                f"workload {one.workload.name}: {'; '.join(unit.describe() for unit in left)} after "
                f"{one.workload.stop_timeout + _QUERY:.0f} s; see what it does with: systemctl status {left[0].id}; "
                f"end it with: {left[0].next}"
            )

    def _prove_free(self, wait: float, result: Mapping[str, Any]) -> None:
        """After stopping, nobody but the platform's services may have a GPU open."""
        left = self._wait_for_others([], max(_SETTLE, wait), WAIT)
        if left:
            raise WorkloadsError(
                f"work is stopped, but GPUs are still open: {'; '.join(holder.describe() for holder in left)}. "
                f"Next: {'; '.join(dict.fromkeys(holder.next for holder in left))}",
                result,
            )

    # -- starting

    def start(
        self,
        declared: Sequence[Workload] = (),
        check: bool = False,
        stay: Sequence[str] = (),
        back_from: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Start what was running before :meth:`stop`, and nothing else, in the reverse order; forget it once it is
        ready. ``declared`` may bring newer ``ready`` probes; ``stay`` names what stays where it was started instead;
        ``back_from`` the hosts where nothing of this node runs any more.

        :raises WorkloadsError: naming what did not come back, or may run elsewhere; it stays remembered.
        """
        records = {name: dict(kept) for name, kept in (self.journal.before(KIND) or {}).items()}
        for name in records.keys() & set(stay):
            records[name]["running"] = False
        away = {name: kept["elsewhere"] for name, kept in records.items() if kept["running"] and kept.get("elsewhere")}
        away = {name: host for name, host in away.items() if host not in back_from}
        if away:
            where = "; ".join(f"{name} on {host}" for name, host in sorted(away.items()))
            raise WorkloadsError(
                f"work of this node may run elsewhere, so nothing was started here: {where}. Declare it with elsewhere "
                f"as before, so that it is stopped there; or, if that host is gone, name it in gpu_elsewhere_gone"
            )
        for work in declared:
            if work.name in records:
                records[work.name].update(ready=list(work.ready), ready_timeout=work.ready_timeout)
        again = sorted((n for n in records if records[n]["running"]), key=lambda n: records[n]["order"], reverse=True)
        again.sort(key=lambda name: records[name]["container"] is not None)
        before = dict.fromkeys(records, "stopped")
        after = {**before, **dict.fromkeys(again, "running")}
        result: dict[str, Any] = {
            "changed": bool(records or self.hold.held()),
            "started": again,
            "left_stopped": sorted(set(records) - set(again)),
            "failed_workloads": [],
            "workloads": after,
            "diff": {"before": before, "after": after},
        }
        if check or not result["changed"]:
            return result
        self.journal.start("start workloads", self.now())
        if self.hold.lift():
            self.systemd.reload()
        if any(records[name]["container"] for name in again):
            # a container that names /dev/nvidia-uvm does not start before that node is made
            self.run(["nvidia-modprobe", "-u", "-c=0"], timeout=_QUERY)
        failed = {}
        for name in [*again, *result["left_stopped"]]:
            trouble = self.bring_up(records[name])
            if trouble:
                failed[name] = f"{name}: {trouble}"
        result["failed_workloads"] = sorted(failed)
        after.update(dict.fromkeys(failed, "failed"))
        if failed:
            message = "work did not come back: " + "; ".join(failed[name] for name in sorted(failed))
            self.journal.end("start workloads", self.now(), state="failed", reason=message)
            raise WorkloadsError(message, result)
        self.journal.forget(KIND)
        self.journal.end("start workloads", self.now())
        return result

    def bring_up(self, record: Mapping[str, Any]) -> str:
        """Bring one workload back to how :func:`record` found it; what is wrong with it, or an empty text."""
        if record["container"]:
            trouble = self._start_container(record)
        else:
            trouble = self._start_units(record) if record["running"] else ""
        if trouble or not record["running"] or not record["ready"]:
            return trouble
        deadline = self.monotonic() + record["ready_timeout"]
        pause = _SOON
        while True:
            left = deadline - self.monotonic()
            said = self.run(record["ready"], timeout=max(1.0, left))
            if said.ok:
                return ""
            if deadline - self.monotonic() <= 0:
                return f"is running, but not ready after {record['ready_timeout']:.0f} s ({said.describe()})"
            self.sleep(pause)
            pause = min(2.0, 2 * pause)

    def take_down(self, one: Found) -> None:
        """Stop a workload that is somebody else's guest here, leaving its unit or container free to start again.

        :raises WorkloadsError: if it does not stop.
        """
        if one.units:
            self._stop_units(one)
        elif one.container and one.container.running and one.workload.container:
            engine = Engine(one.workload.engine, self.run)
            said = engine.stop(one.workload.container, one.workload.stop_timeout)
            now = engine.inspect(one.workload.container)
            if now is not None and now.running:
                raise WorkloadsError(f"container {one.workload.container} did not stop ({said.describe()})")

    def _start_units(self, record: Mapping[str, Any]) -> str:
        deadline = self.monotonic() + record["ready_timeout"]
        for name in record["units"]:
            self.systemd.start(name, timeout=max(1.0, deadline - self.monotonic()))
        left = max(1.0, deadline - self.monotonic())
        late = self.systemd.wait_back(record["units"], left, twice=not record["ready"])
        return "; ".join(
            f'{unit.describe()}, last said "{self.systemd.last_words(unit.id)}" (next: {unit.next})'
            if unit.present
            else f"{unit.id} is no longer there"
            for unit in late
        )

    def _start_container(self, record: Mapping[str, Any]) -> str:
        name, engine = record["container"], Engine(record["engine"], self.run)
        try:
            container = engine.inspect(name)
            if container is None:
                return f"container {name} is no longer there" if record["running"] else ""
            said = engine.start(name) if record["running"] and not container.running else None
            trouble = self._watch_container(engine, name, said) if record["running"] else ""
        except WorkloadsError as exc:
            return str(exc)
        if record["policy"] and record["policy"] != container.policy:
            said = engine.set_policy(name, record["policy"])
            if not said.ok and not trouble:
                return f"its restart policy could not be set to {record['policy']} again ({said.describe()})"
        return trouble

    def _watch_container(self, engine: Engine, name: str, said: Completed | None) -> str:
        """A container that runs now and still does a second later has started."""
        for pause in (1.0, 0.0):
            container = engine.inspect(name)
            if container is None or not container.running:
                status = f"{container.status} with {container.exit_code} {container.error}" if container else "gone"
                how = f" ({said.describe()})" if said and not said.ok else ""
                return f"container {name} is {status.strip()}{how} (next: {engine.name} logs --tail 20 {name})"
            self.sleep(pause)
        return ""
