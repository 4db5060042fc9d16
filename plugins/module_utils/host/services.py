# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The services that keep the NVIDIA driver open: stop them for an upgrade, and put back exactly what was running.

What is stopped follows from what is really active, not from which unit started it (nvsm.service is not running while
its children are); an alias and its unit are one. What was up is written to the journal before anything is touched.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import version
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders, identity
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

KIND, DETACHED = "services", "dcgm"
"""Kinds in the journal: how each unit was, and the DCGM unit that has let go of the driver and still runs."""

KNOWN = (
    "nvidia-persistenced.service",
    "nvlsm.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "nvidia-gridd.service",
    "nvidia-topologyd.service",
    "nvidia-powerd.service",
    "nvidia-mig-manager.service",
    "nvidia-mps.service",
    "nvidia-cuda-mps-control.service",
    "nvidia-cdi-refresh.service",
    "nvidia-cdi-refresh.path",
    "nvidia-dcgm.service",
    "dcgm.service",
    "nvsm.service",
    "dcgm-exporter.service",
    "nvidia-dcgm-exporter.service",
    "nvidia_gpu_exporter.service",
)
"""Services that open the driver as part of the platform, in the order to start them."""

PATTERNS = ("nvsm*.service", "nvidia-mps@*.service", "nvidia-mps-*.service")
"""Families of such services: nvsm.service starts nvsm-core and others; MPS may run once per GPU or user."""

DCGM = ("nvidia-dcgm.service", "dcgm.service")
_DETACH_DCGM, _DETACH_DRIVER = (4, 5), "590"  # DCGM documentation, "Detached GPUs"

_MPS = "nvidia-cuda-mps-control"
_MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - where CUDA puts its pipe unless told otherwise
_NEEDED = re.compile(
    r"(user@|systemd-|dbus|polkit|cron|sshd?[.@]|docker\.|containerd\.|crio\.|podman\.|kubelet|k3s|rke2|slurmd)"
)
_CONTAINER = re.compile(r"docker|libpod|kubepods|containerd|crio|lxc")
_PROGRAMS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ServicesError(Exception):
    """Something could not be stopped or did not come back; the text says what, and the next command.

    ``result`` is what was done until then.
    """

    def __init__(self, message: str, result: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.result = dict(result or {})


@dataclass(frozen=True)
class MpsDaemon:
    """A control daemon of the Multi-Process Service; ``directory`` holds its pipe, ``unit`` is the service that runs
    it, if one does."""

    pid: int
    unit: str | None
    user: str
    directory: str
    env: Mapping[str, str]


@dataclass
class Survey:
    """What is there, before anything is done."""

    units: dict[str, Unit]
    order: list[str]
    """Names of ``units`` in the order to start them."""
    kept: list[str] = field(default_factory=list)
    mps: list[MpsDaemon] = field(default_factory=list)

    @property
    def up(self) -> list[Unit]:
        """Running units in the order to stop them."""
        return [self.units[name] for name in to_stop(self.order) if self.units[name].up]


def is_known(unit: str) -> bool:
    """Whether a unit is one of the platform's services that hold the driver, so not somebody's work."""
    return unit in KNOWN or any(fnmatchcase(unit, pattern) for pattern in PATTERNS)


def is_needed(unit: str) -> bool:
    """Whether a service is not to be stopped for a process that merely runs in its control group: logins, containers
    and jobs live there."""
    return bool(_NEEDED.match(unit))


def watchers(census: holders.Census) -> list[str]:
    """Services of the system that hold GPUs without computing on them, such as an agent that keeps NVML open."""
    owners = [one.process.owner for one in census.processes if one.process and one.kind == holders.MANAGEMENT]
    units = [owner.unit for owner in owners if owner.unit and owner.user_unit_of is None and not owner.container]
    return sorted({unit for unit in units if unit.endswith(".service") and not is_needed(unit)})


def parse_dcgm_version(text: str) -> tuple[int, ...] | None:
    """The version in what ``dcgmi --version`` prints, or None."""
    found = re.search(r"\b(\d+)\.(\d+)\.(\d+)\b", text)
    return tuple(int(part) for part in found.groups()) if found else None


def can_detach(dcgm: tuple[int, ...] | None, driver: version.DriverVersion | None) -> bool:
    """Whether this DCGM can let go of this driver without being stopped."""
    return (
        dcgm is not None and dcgm >= _DETACH_DCGM and driver is not None and int(driver.branch) >= int(_DETACH_DRIVER)
    )


def parse_mps(
    pid: int, cmdline: bytes, status: Mapping[str, str], environ: bytes, cgroup: str, program: str
) -> MpsDaemon | None:
    """The MPS daemon a process is, from its files in /proc and the ``program`` it runs, or None.

    None too for one in a container, which is stopped with its container. ``/proc/PID/comm`` would not do: it is cut
    to 15 characters, and so the same for the daemon and its servers. Nor would the command line alone: it is what
    whoever started the process wanted it to be, also of a program that runs with more rights than theirs.
    """
    words = cmdline.rstrip(b"\0").split(b"\0")
    if Path(program.replace(" (deleted)", "")).name != _MPS or not {b"-d", b"-f"}.intersection(words[1:]):
        return None
    uids = status.get("Uid", "").split()[:2]  # real and effective
    if len(set(uids)) != 1 or _CONTAINER.search(cgroup):
        return None
    owner = identity.parse_cgroup(cgroup)
    unit = owner.unit if owner.user_unit_of is None else None
    pairs = (part.decode("utf-8", "surrogateescape").partition("=") for part in environ.split(b"\0") if b"=" in part)
    env = {key: value for key, dummy, value in pairs if key.startswith("CUDA_")}
    directory = env.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_DIRECTORY)
    named = unit if unit and unit.endswith(".service") and not is_needed(unit) else None
    return MpsDaemon(pid, named, identity.user_name(int(uids[0])), directory, env)


def find_mps(proc: Path) -> list[MpsDaemon]:
    """MPS control daemons outside containers."""
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            cmdline = (entry / "cmdline").read_bytes()
            if _MPS.encode() not in cmdline:
                continue
            status = identity.parse_status((entry / "status").read_text(errors="replace"))
            environ, cgroup = (entry / "environ").read_bytes(), (entry / "cgroup").read_text(errors="replace")
            daemon = parse_mps(int(entry.name), cmdline, status, environ, cgroup, str((entry / "exe").readlink()))
        except OSError:
            continue  # it has ended
        if daemon:
            found.append(daemon)
    return sorted(found, key=lambda daemon: daemon.directory)


class Services:
    """The driver's clients on this node. ``find_watchers`` gives units that nobody named and that hold GPUs all the
    same (see :func:`watchers`)."""

    def __init__(
        self,
        journal: Journal,
        run: Runner,
        now: Callable[[], float] = time.time,
        hold_directory: str = "/run/systemd/system",
        proc: str = "/proc",
        sleep: Callable[[float], None] = time.sleep,
        find_watchers: Callable[[], Sequence[str]] = tuple,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.journal = journal
        self.run = run
        self.now = now
        self.sleep = sleep
        self.monotonic = monotonic
        self.proc = Path(proc)
        self.find_watchers = find_watchers
        self.systemd = Systemd(run, sleep, monotonic)
        self.hold = Hold(
            Path(hold_directory), "Held by gpufleet.driver while the NVIDIA driver of this node is changed."
        )

    def survey(self, extra: Sequence[str] = (), keep: Sequence[str] = ()) -> Survey:
        """What is there and what would be stopped; ``keep`` (names or aliases) is left alone.

        :raises ServicesError: if a unit that is to be kept cannot outlive one that is to be stopped.
        """
        extras = [unit_name(name) for name in extra]
        daemons = find_mps(self.proc)
        seen = [daemon.unit for daemon in daemons if daemon.unit]
        seen += self.find_watchers()
        named = list(dict.fromkeys([*KNOWN, *self.systemd.matching(PATTERNS), *seen, *extras]))
        wanted = {unit_name(name) for name in keep}
        known = self.systemd.show(named)
        kept = sorted(name for name, unit in known.items() if unit.present and wanted.intersection(unit.names))
        first = list(dict.fromkeys(name for name in known if name not in kept))
        units, distance = with_followers(self.systemd, first)
        for name, unit in units.items():
            if not wanted.intersection(unit.names):
                continue
            cause = sorted(other.id for other in units.values() if other.up and name in other.dependents)
            if unit.up and cause:
                raise ServicesError(
                    f"{name} is to be kept, but systemd stops it together with {', '.join(cause)}; "
                    f"keep those too, or see why with: systemctl list-dependencies --reverse {cause[0]}"
                )
            kept.append(name)
        order = [name for name in in_order(distance, first) if name not in kept]
        return Survey(
            {name: units[name] for name in order}, order, sorted(set(kept)), [d for d in daemons if not d.unit]
        )

    def plan_dcgm(self, survey: Survey) -> str | None:
        """The DCGM unit that can stay up with the driver detached, or None."""
        unit = next((unit for unit in survey.up if set(DCGM).intersection(unit.names)), None)
        if unit is None:
            return None
        if self.journal.before(DETACHED) == unit.id:
            return unit.id
        try:
            driver = version.find((self.proc / "driver/nvidia/version").read_text().partition("\n")[0])
        except OSError:
            return None
        said = self.run(["dcgmi", "--version"], timeout=20)
        return unit.id if said.ok and can_detach(parse_dcgm_version(said.stdout), driver) else None

    def stop(self, extra: Sequence[str], keep: Sequence[str], timeout: float, check: bool = False) -> dict[str, Any]:
        """Stop every client that is up and keep it from coming back; safe to run again after a crash at any point.

        :raises ServicesError: if something is still up after ``timeout`` seconds.
        """
        survey = self.survey(extra, keep)
        detach = self.plan_dcgm(survey)
        up = [unit.id for unit in survey.up]
        detached = detach is not None and self.journal.before(DETACHED) == detach
        stopping = [name for name in up if name != detach and not name.endswith(".target")]
        holding = [name for name in survey.order if name != detach]
        changed = bool(stopping or survey.mps or self.hold.missing(holding) or (detach and not detached))
        before = {name: unit.active for name, unit in survey.units.items() if unit.present}
        after = {**before, **dict.fromkeys(stopping, "inactive")}
        result: dict[str, Any] = {
            "changed": changed,
            "stopped": stopping,
            "detached": [detach] if detach else [],
            "mps": [daemon.directory for daemon in survey.mps],
            "kept": survey.kept,
            "services": after,
            "diff": {"before": before, "after": after},
        }
        if check:
            return result
        self._remember(survey, detach)
        if not changed and all(self.hold.loaded(survey.units[name]) for name in holding):
            return result
        self.journal.start("stop services", self.now())
        try:
            self._stop(survey, stopping, holding, detach if not detached else None, timeout, result)
        except ServicesError as exc:
            exc.result = result
            self.journal.end("stop services", self.now(), state="failed", reason=str(exc))
            raise
        self.journal.end("stop services", self.now())
        return result

    def _remember(self, survey: Survey, detach: str | None) -> None:
        """Absent units are remembered too: one that a new package brings and starts was not running before."""
        base = len(self.journal.before(KIND) or {})
        records: dict[str, Any] = {}
        for index, name in enumerate(reversed(survey.order)):
            unit = survey.units[name]
            records[name] = {
                "order": base + index,
                "up": unit.up,
                "was": f"{unit.active} ({unit.sub})",
                "steady": unit.back,
                "enabled": unit.file_state,
                "detach": name == detach,
            }
        for index, daemon in enumerate(survey.mps):
            records[f"mps:{daemon.directory}"] = {
                "order": -1 - index,
                "up": True,
                "user": daemon.user,
                "env": dict(daemon.env),
            }
        self.journal.remember_each(KIND, records)

    def _stop(
        self,
        survey: Survey,
        stopping: Sequence[str],
        holding: Sequence[str],
        detach: str | None,
        timeout: float,
        result: dict[str, Any],
    ) -> None:
        deadline = self.monotonic() + timeout
        self.hold.place(holding)
        if not all(self.hold.loaded(unit) for unit in self.systemd.show(holding).values()):
            self.systemd.reload()
        for daemon in survey.mps:
            self._quit_mps(daemon, max(1.0, deadline - self.monotonic()))
        stopping = list(stopping)
        if detach and not self.run(["dcgmi", "set", "--detach-driver"], timeout=60).ok:
            result["detached"] = []
            stopping = [unit.id for unit in survey.up if unit.id == detach or unit.id in stopping]
            result["stopped"] = stopping
            self.hold.place([detach])
            self.systemd.reload()
        elif detach:
            self.journal.remember(DETACHED, detach)
        for name in stopping:
            self.systemd.stop(name, timeout=max(1.0, deadline - self.monotonic()))
        left = [unit for unit in self.systemd.show(stopping).values() if unit.active not in ("inactive", "failed")]
        if left:
            raise ServicesError(
                f"still not stopped after {timeout:.0f} s: {'; '.join(unit.describe() for unit in left)}. "
                f"A process that does not end may hang in the driver; see its state with: "
                f"systemctl status {left[0].id}; end it with: {left[0].next}"
            )

    def _quit_mps(self, daemon: MpsDaemon, timeout: float) -> None:
        seconds = max(1, int(timeout / 2))
        said = self.run(
            _mps(daemon.user, {**daemon.env, "CUDA_MPS_PIPE_DIRECTORY": daemon.directory}),
            timeout=timeout,
            stdin=f"quit -t {seconds}\n",
        )
        deadline = self.monotonic() + timeout
        while any(other.pid == daemon.pid for other in find_mps(self.proc)):
            if self.monotonic() >= deadline:
                raise ServicesError(
                    f"the MPS control daemon (pid {daemon.pid}, user {daemon.user}, pipe in {daemon.directory}) did "
                    f"not quit within {timeout:.0f} s ({said.describe()}); its clients: "
                    f"echo get_server_list | CUDA_MPS_PIPE_DIRECTORY={daemon.directory} {_MPS}"
                )
            self.sleep(0.2)

    def restore(self, timeout: float, check: bool = False) -> dict[str, Any]:
        """Start what was up before :meth:`stop`, and nothing else; forget it once it is back.

        :raises ServicesError: naming what did not come back within ``timeout`` seconds; it stays remembered.
        """
        records: Mapping[str, Any] = self.journal.before(KIND) or {}
        names = [name for name in records if not name.startswith("mps:")]
        shown = self.systemd.show(names)
        by_name = {alias: unit for unit in shown.values() for alias in unit.names}

        def up(name: str) -> bool:
            return by_name[name].up

        wanted = sorted((n for n in names if records[n]["up"]), key=lambda n: records[n]["order"], reverse=True)
        running = {daemon.directory for daemon in find_mps(self.proc)}
        mps = [name[len("mps:") :] for name in records if name.startswith("mps:")]
        start = [name for name in wanted if not up(name)]
        before = {name: unit.active for name, unit in shown.items() if unit.present}
        after = {**before, **dict.fromkeys(start, "active")}
        result: dict[str, Any] = {
            "changed": bool(records or self.hold.held()),
            "started": start,
            "attached": [name for name in wanted if records[name]["detach"] and up(name)],
            "mps": [directory for directory in mps if directory not in running],
            "left_stopped": [n for n in sorted(names) if not records[n]["up"] and by_name[n].present and not up(n)],
            "failed_units": [],
            "services": after,
            "diff": {"before": before, "after": after},
        }
        if check or not result["changed"]:
            return result
        self.journal.start("restore services", self.now())
        failed = self._restore(records, wanted, by_name, result, timeout)
        after = {name: unit.active for name, unit in self.systemd.show(names).items() if unit.present}
        result.update(services=after, diff={"before": before, "after": after})
        result["failed_units"] = sorted(failed)
        if failed:
            message = "not back as before the upgrade: " + "; ".join(failed[name] for name in sorted(failed))
            self.journal.end("restore services", self.now(), state="failed", reason=message)
            raise ServicesError(message, result)
        self.journal.forget(DETACHED)
        self.journal.forget(KIND)
        self.journal.end("restore services", self.now())
        return result

    def _restore(
        self,
        records: Mapping[str, Any],
        wanted: Sequence[str],
        by_name: Mapping[str, Unit],
        result: dict[str, Any],
        timeout: float,
    ) -> dict[str, str]:
        deadline = self.monotonic() + timeout
        self._enable_as_before(records, by_name)
        lifted = self.hold.lift()
        for name in result["started"]:
            self.systemd.start(name, timeout=max(1.0, deadline - self.monotonic()))
        if lifted:
            self.systemd.reload()
        for name in result["attached"]:
            if not self.run(["dcgmi", "set", "--attach-driver"], timeout=60).ok:
                # the driver that is loaded now may be too old to be attached to
                self.systemd.stop(name, timeout=max(1.0, deadline - self.monotonic()))
                self.systemd.start(name, timeout=max(1.0, deadline - self.monotonic()))
        steady = [name for name in wanted if records[name]["steady"]]
        late = self.systemd.wait_back(steady, max(1.0, deadline - self.monotonic())) if steady else []
        failed = {unit.id: self._explain(unit) for unit in late}
        for directory in result["mps"]:
            record = records[f"mps:{directory}"]
            said = self.run(_mps(record["user"], record["env"], "-d"), timeout=30)
            if not any(daemon.directory == directory for daemon in find_mps(self.proc)):
                failed[f"mps:{directory}"] = f"the MPS control daemon of {directory} ({said.describe()})"
        return failed

    def _enable_as_before(self, records: Mapping[str, Any], by_name: Mapping[str, Unit]) -> None:
        """A package that was removed and installed again, or renamed, starts with its vendor's idea of enabled."""
        for name, record in records.items():
            unit = by_name.get(name)
            before = record.get("enabled")
            if unit and before in ("enabled", "disabled") and unit.file_state in {"enabled", "disabled"} - {before}:
                self.systemd.set_enabled(name, before == "enabled")

    def _explain(self, unit: Unit) -> str:
        if not unit.present:
            return f"{unit.id} was running before and is no longer installed"
        words = self.systemd.last_words(unit.id)
        said = f', last said "{words}"' if words else ""
        return f"{unit.describe()}{said} (next: {unit.next})"


def _mps(user: str, env: Mapping[str, str], *options: str) -> list[str]:
    """The MPS control program, as ``user``, since a daemon answers only to who started it; and with nothing of our own
    environment."""
    command = ["env", "-i", f"PATH={_PROGRAMS}", *(f"{key}={value}" for key, value in env.items()), _MPS, *options]
    return command if user in ("root", "0") else ["runuser", "-u", user, "--", *command]
