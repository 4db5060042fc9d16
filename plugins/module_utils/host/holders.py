# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The census: everything that keeps the NVIDIA kernel modules loaded, by name, and what would make it let go.

Sources are the kernel's own: /proc/PID/fd and maps, /proc/modules, /sys/module. Not nvidia-smi, which shows compute
contexts only and nothing across PID namespaces, and not the state of units, which proves nothing.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, WARNING, Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.host import kernel_modules, processes
from ansible_collections.gpufleet.driver.plugins.module_utils.host.identity import (
    Identity,
    Owner,
    identify,
    parse_container_names,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.host.kernel_modules import Module
from ansible_collections.gpufleet.driver.plugins.module_utils.host.processes import Number, Scan, Scanner, Use

WORKLOAD, MANAGEMENT, SYSTEM, KERNEL, UNKNOWN = "workload", "management", "system", "kernel", "unknown"

SCAN_SECONDS = 60.0
PROBE_SECONDS = 20.0

_MANAGEMENT = re.compile(
    r"nvidia-(?:persiste|powerd|gridd|topology|fabricman|imex|mig-|cuda-mps|mps|dcgm|device-p|smi|settings|modprobe)"
    r"|nv-(?:hostengine|fabricman)|nvlsm|nvsm|dcgm|mps-|gpu-feature|nvidia_gpu_exp|nvtop|nvitop|gpustat"
    r"|telegraf|node[-_]exporter|nomad|prometheus|otelcol|datadog|netdata|zabbix_agent|collectd"
)
"""Programs and units that talk to the driver to manage or watch it, by the start of the name (a process name is cut at
15 characters)."""

_DISPLAY = re.compile(
    r"Xorg|X$|Xwayland|gnome-shell|gdm|sddm|lightdm|kwin_|weston|plymouthd|display-manager|sway$|mutter|plasmashell"
)
_LOGIND = "systemd-logind"

_NURSERY = re.compile(
    r"(?:sshd?|sshd?@.*|dropbear|crond?|anacron|atd|dbus|dbus-broker|docker|containerd|crio|kubelet|slurmd|"
    r"systemd-.*|user@.*|getty@.*|serial-getty@.*|libvirtd|supervisor)\.service"
)
"""Units in which other people's processes live: never to be stopped for the sake of one of those."""


@dataclass(frozen=True)
class Device:
    """A device node, or a whole major, of the driver. ``role`` is gpu, control, compute, display or other."""

    path: str
    module: str
    role: str


class Devices:
    """Which device numbers belong to the driver's modules."""

    def __init__(self, nodes: Mapping[Number, Device], majors: Mapping[int, str]) -> None:
        self.nodes = dict(nodes)
        self.majors = dict(majors)

    def describe(self, number: Number) -> Device:
        """The device by its number, under its usual path, or one made up from the driver's name in /proc/devices."""
        if number in self.nodes:
            return self.nodes[number]
        name = self.majors.get(number[0], "nvidia")
        return _device(_usual_path(name, number[1]), number)

    def paths(self) -> dict[str, Number]:
        return {device.path: number for number, device in self.nodes.items()}


def parse_devices(text: str) -> dict[int, str]:
    """The character devices of /proc/devices; a major that has several names keeps the first."""
    majors: dict[int, str] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        fields = line.split()
        if len(fields) == 2 and fields[0].isdigit():
            majors.setdefault(int(fields[0]), fields[1])
    return majors


def find_devices(
    members: Iterable[str], proc: str = "/proc", sys: str = "/sys", dev: str = "/dev", root: str = "nvidia"
) -> Devices:
    """Every device of the modules ``members``: majors under a driver's name, the nodes in ``dev`` by exact number, and
    what the kernel hangs below a GPU (DRM, frame buffer and I2C nodes)."""
    names = {name.replace("-", "_") for name in members}
    majors = {
        major: name
        for major, name in parse_devices(_read(Path(proc, "devices"))).items()
        if name.startswith(root) or name.replace("-", "_") in names
    }
    nodes: dict[Number, Device] = {}
    for path in _node_paths(Path(dev), names):
        try:
            about = path.stat()
        except OSError:
            continue
        if stat.S_ISCHR(about.st_mode):
            number = (os.major(about.st_rdev), os.minor(about.st_rdev))
            device = _device(f"/dev/{path.relative_to(dev)}", number)
            if device.module in names or number[0] in majors:  # else it outlived its module; the number may be reused
                nodes[number] = device
    nodes.update(_misc(Path(proc, "misc"), names))
    nodes.update(_below_gpus(Path(sys), Path(dev), root))
    return Devices(nodes, majors)


def _node_paths(dev: Path, names: set[str]) -> list[Path]:
    patterns = ("nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", *sorted(f"{name}*" for name in names))
    return [path for pattern in patterns for path in sorted(dev.glob(pattern))]


def _misc(path: Path, names: set[str]) -> dict[Number, Device]:
    """Miscellaneous devices (major 10) that a module of the family registered under its own name."""
    rows = (line.split() for line in _read(path).splitlines())
    return {
        (10, int(row[0])): Device(f"/dev/{row[1]}", row[1].replace("-", "_"), "other")
        for row in rows
        if len(row) == 2 and row[1].replace("-", "_") in names
    }


def _below_gpus(sys: Path, dev: Path, root: str) -> dict[Number, Device]:
    nodes: dict[Number, Device] = {}
    for kind, folder, module in (
        ("drm", "dri/", "nvidia_drm"),
        ("graphics", "", "nvidia_drm"),
        ("i2c-dev", "", root),
        ("drm_dp_aux_dev", "", "nvidia_drm"),
    ):
        for entry in sorted((sys / "class" / kind).glob("*")):
            if _bound_to(entry) != root:
                continue
            path = f"/dev/{folder}{entry.name}"
            number = _number(_read(entry / "dev")) or _number_of_node(dev / f"{folder}{entry.name}")
            if number:
                nodes[number] = Device(path, module, "display" if module == "nvidia_drm" else "other")
    return nodes


def _bound_to(entry: Path) -> str | None:
    """The driver of the nearest device above a class device that has one."""
    place = Path(os.path.realpath(entry / "device" if (entry / "device").exists() else entry))
    for directory in (place, *place.parents):
        link = directory / "driver"
        if link.is_symlink():
            return link.readlink().name
    return None


def _number(text: str) -> Number | None:
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    return (int(match[1]), int(match[2])) if match else None


def _number_of_node(path: Path) -> Number | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return (os.major(about.st_rdev), os.minor(about.st_rdev)) if stat.S_ISCHR(about.st_mode) else None


def _usual_path(driver: str, minor: int) -> str:
    """The node of a minor of a driver named in /proc/devices."""
    if driver in ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-modeset"):
        return {255: "/dev/nvidiactl", 254: "/dev/nvidia-modeset"}.get(minor, f"/dev/nvidia{minor}")
    if driver == "nvidia-uvm":
        return "/dev/nvidia-uvm" if minor == 0 else "/dev/nvidia-uvm-tools"
    return f"/dev/{driver}" if minor == 0 else f"/dev/{driver} (minor {minor})"


def _device(path: str, number: Number) -> Device:
    name = path.rpartition("/")[2].split(" ")[0]
    if name.startswith("nvidia-uvm"):
        return Device(path, "nvidia_uvm", "compute")
    if name == "nvidia-modeset":
        return Device(path, "nvidia_modeset", "control")
    if re.fullmatch(r"nvidia\d+", name):
        return Device(path, "nvidia", "gpu")
    if name == "nvidiactl":
        return Device(path, "nvidia", "control")
    if name.startswith("nvidia-fs"):
        return Device(path, "nvidia_fs", "other")
    if name.startswith("nvidia"):
        return Device(path, "nvidia", "other")
    return Device(path, re.sub(r"\d+$", "", name).replace("-", "_"), "other")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Release:
    """What makes a holder let go: a command to run as root, or only a sentence where no single command does."""

    advice: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Holder:
    """A process that has devices of the driver open or mapped, or a module that uses the driver."""

    kind: str
    name: str
    devices: tuple[str, ...]
    modules: tuple[str, ...]
    release: Release
    process: Identity | None = None
    opened: int = 0
    mapped: int = 0
    container_name: str | None = None
    blocked_in: str | None = None
    """Where in the kernel a process in uninterruptible sleep stands."""
    zombie_parent: int | None = None

    @property
    def title(self) -> str:
        """One short phrase for a message: PID, name and the largest thing it is part of."""
        if self.process is None:
            return f"module {self.name}"
        owner = self.process.owner
        part = (
            (f"pod {owner.pod}" if owner.pod else None)
            or (f"Slurm job {owner.job}" + (f" step {owner.step}" if owner.step else "") if owner.job else None)
            or (f"container {self.container_name or owner.container[:12]}" if owner.container else None)
            or (owner.unit if owner.unit else None)
            or f"user {self.process.user}"
        )
        return f"PID {self.process.pid} {self.name} ({part})"

    def as_dict(self) -> dict[str, Any]:
        process = self.process
        owner = process.owner if process else Owner()
        return {
            "kind": self.kind,
            "name": self.name,
            "title": self.title,
            "devices": list(self.devices),
            "modules": list(self.modules),
            "open_files": self.opened,
            "mappings": self.mapped,
            "pid": process.pid if process else None,
            "pids": list(process.pids) if process else [],
            "ppid": process.ppid if process else None,
            "state": process.state if process else None,
            "command": process.command if process else None,
            "user": process.user if process else None,
            "login": process.login if process else None,
            **asdict(owner),
            "container_name": self.container_name,
            "blocked_in": self.blocked_in,
            "zombie_parent": self.zombie_parent,
            "release": {"advice": self.release.advice, "argv": list(self.release.argv)},
        }


@dataclass(frozen=True)
class Suspended:
    """A process that maps libcuda and has no device open; ``state`` is one of the words below, or unknown."""

    process: Identity
    library: str
    state: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "pid": self.process.pid,
            "name": self.process.comm,
            "command": self.process.command,
            "user": self.process.user,
            **asdict(self.process.owner),
            "library": self.library,
            "state": self.state,
        }


@dataclass(frozen=True)
class Census:
    """Everything that keeps the driver loaded. ``complete`` is False where part of the host could not be seen."""

    modules: Mapping[str, Module]
    order: tuple[str, ...]
    holders: tuple[Holder, ...] = ()
    suspended: tuple[Suspended, ...] = ()
    unexplained: Mapping[str, int] = field(default_factory=dict)
    """Module → references beyond those of other modules, where no process was found that has a device of it open."""
    findings: tuple[Finding, ...] = ()
    complete: bool = True
    reboot_required: bool = False

    @property
    def processes(self) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if holder.process)

    @property
    def releasable(self) -> bool:
        """Whether the modules can go once every holder has let go, without a reboot."""
        return not self.reboot_required and not self.suspended_at_stake

    @property
    def suspended_at_stake(self) -> tuple[Suspended, ...]:
        return tuple(one for one in self.suspended if one.state in _AT_STAKE)

    @property
    def blocked(self) -> bool:
        """Whether an attempt to unload would fail or do harm now."""
        return bool(self.processes or self.suspended_at_stake or self.reboot_required or self.unexplained)

    def as_dict(self) -> dict[str, Any]:
        return {
            "modules": [module.as_dict() for module in self.modules.values()],
            "order": list(self.order),
            "holders": [holder.as_dict() for holder in self.holders],
            "suspended": [one.as_dict() for one in self.suspended],
            "unexplained": dict(self.unexplained),
            "findings": [finding.as_dict() for finding in self.findings],
            "releasable": self.releasable,
            "reboot_required": self.reboot_required,
            "complete": self.complete,
        }


RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"
STOPPED = "stopped"
"""Our own word: a process that a signal has stopped answers no driver, so it may well be checkpointed."""
_CHECKPOINT_STATES = (RUNNING, LOCKED, CHECKPOINTED, FAILED)
_AT_STAKE = (LOCKED, CHECKPOINTED, STOPPED)

Probe = Callable[[Sequence[int], float], Mapping[int, str]]
"""PIDs and seconds → the CUDA checkpoint state of each, ``none`` if it is no CUDA process, ``unknown``."""


def checkpoint_states(pids: Sequence[int], timeout: float, library: str = "libcuda.so.1") -> dict[int, str]:
    """Ask the driver for the checkpoint state of processes, in a child with a deadline: even a read can hang while a
    process that shares memory with this one is locked. If that happens, each is asked for on its own.

    cuCheckpointProcessGetState where libcuda has it (driver 570 and later), else ``cuda-checkpoint --get-state``.
    """
    end = time.monotonic() + timeout
    together = execution.call(_driver_states, pids, library, timeout=timeout / 2)
    if together.ok and together.value is not None:
        return dict(together.value)
    states = dict.fromkeys(pids, UNKNOWN)
    for position, pid in enumerate(pids):
        share = (end - time.monotonic()) / (len(pids) - position)
        if share <= 0:
            break
        if together.timed_out:
            alone = execution.call(_driver_states, [pid], library, timeout=share)
            states.update(alone.value or {})
            continue
        done = execution.run(["cuda-checkpoint", "--get-state", "--pid", str(pid)], timeout=share)
        if done.rc == execution.NOT_FOUND_RC:
            break
        states[pid] = _word(done)
    return states


def _word(done: execution.Completed) -> str:
    word = done.stdout.strip().lower()
    if done.ok:
        return word if word in _CHECKPOINT_STATES else UNKNOWN
    return UNKNOWN if done.timed_out else "none"


def _driver_states(pids: Sequence[int], library: str) -> dict[int, str] | None:
    """None if this libcuda cannot tell, or is not there."""
    try:
        driver = ctypes.CDLL(library)
        ask = driver.cuCheckpointProcessGetState
    except (OSError, AttributeError):
        return None
    states = {}
    for pid in pids:
        state = ctypes.c_int(-1)
        code = ask(ctypes.c_int(pid), ctypes.byref(state))
        if code == 3 and driver.cuInit(0) == 0:  # CUDA_ERROR_NOT_INITIALIZED
            code = ask(ctypes.c_int(pid), ctypes.byref(state))
        if code == 0:
            states[pid] = _CHECKPOINT_STATES[state.value] if 0 <= state.value < len(_CHECKPOINT_STATES) else LOCKED
        else:
            states[pid] = UNKNOWN if code == 3 else "none"
    return states


def take(
    *,
    devices: Devices | None = None,
    proc: str = "/proc",
    sys: str = "/sys",
    dev: str = "/dev",
    run: execution.Runner | None = None,
    probe: Probe = checkpoint_states,
    scan_seconds: float = SCAN_SECONDS,
    probe_seconds: float = PROBE_SECONDS,
    patience: float = 5.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Census:
    """Take the census of one host.

    ``devices`` replaces what would be found in ``proc``, ``sys`` and ``dev``. ``run``, if given, is used to learn the
    names of containers. A process in uninterruptible sleep has ``patience`` seconds to come out of it before it counts
    as stuck. Everything is bounded: the walk over /proc by ``scan_seconds`` (twice at worst), all questions to the
    driver together by ``probe_seconds``.
    """
    modules = kernel_modules.read_modules(proc, sys)
    order = tuple(kernel_modules.unload_order(modules))
    if devices is None:
        if not modules:
            return Census(modules, order)
        devices = find_devices(modules, proc, sys, dev)
    scan, findings = _scan(devices, proc, scan_seconds)
    findings += _visibility(scan, proc)
    stuck = _stuck(scan, proc, patience, sleep)
    complete = not findings and not (scan.blocked.keys() - stuck.keys() - scan.uses.keys())
    people = _identities({*scan.uses, *stuck, *scan.libraries}, proc)
    names = _container_names(run, people.values()) if run else {}
    held = [
        _holder(people[pid], scan.uses.get(pid, Use(pid)), devices, scan, stuck.get(pid), names)
        for pid in sorted({*scan.uses, *stuck} & people.keys())
    ]
    unexplained = _unexplained(modules, held)
    suspended, doubts = _suspended(scan, people, probe, 0 if stuck else probe_seconds)
    findings += doubts
    findings += _judge(modules, held, unexplained, scan, Path(proc), Path(sys))
    reboot = any(finding.evidence.get("reboot") for finding in findings)
    dependants = [_module_holder(module, modules) for module in modules.values() if module.name != kernel_modules.ROOT]
    return Census(
        modules,
        order,
        (*held, *dependants),
        tuple(suspended),
        unexplained,
        tuple(findings),
        complete,
        reboot,
    )


def _scan(devices: Devices, proc: str, seconds: float) -> tuple[Scan, list[Finding]]:
    """Walk /proc in a child. If that hangs, a process is stuck holding its own memory map: again, without maps."""
    done = execution.call(_walk, devices, proc, True, timeout=seconds)
    if done.ok:
        return done.value, []
    problem = f"did not end within {seconds:.0f} s" if done.timed_out else f"failed: {done.error}"
    again = execution.call(_walk, devices, proc, False, timeout=seconds)
    scan = again.value if again.ok else Scan()
    seen = "open files only" if again.ok else "nothing"
    return scan, [
        Finding(
            "holders.scan",
            ERROR,
            f"reading the maps of all processes {problem}; this census is of {seen}",
            {"reboot": done.timed_out},
            "look for processes in state D (ps -eo pid,stat,wchan,comm | grep ' D'); if they stay, reboot",
        )
    ]


def _walk(devices: Devices, proc: str, read_maps: bool) -> Scan:
    gc.disable()  # this child lives for one walk; collecting would copy every page it shares with its parent
    return Scanner(devices.nodes, devices.majors, devices.paths(), proc, read_maps).run()


def _visibility(scan: Scan, proc: str) -> list[Finding]:
    findings = []
    if not processes.in_initial_pid_namespace(proc):
        findings.append(
            Finding(
                "holders.pid_namespace",
                WARNING,
                "this census was taken inside a PID namespace (a container): processes outside it cannot be seen",
                {},
                "run it on the host itself",
            )
        )
    if scan.denied and os.geteuid() != 0:
        findings.append(
            Finding(
                "holders.denied",
                ERROR,
                f"{len(scan.denied)} of {scan.processes} processes could not be looked into, as this ran as "
                f"uid {os.geteuid()}, not root",
                {"pids": scan.denied[:20]},
                "run it as root (become: true)",
            )
        )
    elif scan.denied:
        findings.append(
            Finding(
                "holders.denied",
                WARNING,
                f"{len(scan.denied)} of {scan.processes} processes could not be looked into, although this ran as root",
                {"pids": scan.denied[:20]},
                "check for a restriction on ptrace (container, SELinux, AppArmor)",
            )
        )
    return findings


def _stuck(scan: Scan, proc: str, patience: float, sleep: Callable[[float], None]) -> dict[int, str]:
    """Processes that stay in uninterruptible sleep inside the driver → the kernel function they wait in."""
    waiting = {pid: place for pid in scan.blocked if (place := _inside_driver(pid, proc, pid in scan.uses))}
    step = 0.5
    while waiting and patience > 0:
        sleep(step)
        patience -= step
        waiting = {pid: place for pid in waiting if (place := _inside_driver(pid, proc, pid in scan.uses))}
    return waiting


def _inside_driver(pid: int, proc: str, holds: bool) -> str | None:
    """The place in the kernel, if the process is in state D and there is reason to think that is inside the driver:
    its stack runs through an nvidia module, or it holds a device of it."""
    try:
        if processes.parse_stat(processes.read(f"{proc}/{pid}/stat")).state != "D":
            return None
    except (OSError, ValueError):
        return None
    stack = _read(Path(proc, str(pid), "stack"))
    wchan = _read(Path(proc, str(pid), "wchan")).strip()
    if "[nvidia" in stack or re.match(r"(?:_?nv|rm_|uvm_|os_acquire)", wchan) or holds:
        inside = next((line for line in stack.splitlines() if "[nvidia" in line), "")
        return inside.replace("[<0>] ", "").strip() or (
            wchan if wchan not in ("", "0") else "an unnamed kernel function"
        )
    return None


def _identities(pids: Iterable[int], proc: str) -> dict[int, Identity]:
    people = {}
    for pid in pids:
        try:
            people[pid] = identify(pid, proc)
        except (OSError, ValueError):
            continue
    return people


def _container_names(run: execution.Runner, people: Iterable[Identity]) -> dict[str, str]:
    names: dict[str, str] = {}
    for runtime in sorted({person.owner.runtime or "" for person in people} & {"docker", "podman"}):
        done = run([runtime, "ps", "--no-trunc", "--format", "{{.ID}} {{.Names}}"], timeout=10)
        if done.ok:
            names.update(parse_container_names(done.stdout))
    return names


def _holder(
    person: Identity, use: Use, devices: Devices, scan: Scan, stuck: str | None, names: Mapping[str, str]
) -> Holder:
    used = [devices.describe(number) for number in sorted(use.numbers)]
    kind = classify(person, {device.role for device in used})
    container_name = names.get(person.owner.container or "") if person.owner.user_unit_of is None else None
    return Holder(
        kind=kind,
        name=person.comm,
        devices=tuple(device.path for device in used),
        modules=tuple(sorted({device.module for device in used})),
        release=release(person, kind, stuck, container_name),
        process=person,
        opened=sum(use.opened.values()),
        mapped=len(use.mapped),
        container_name=container_name,
        blocked_in=stuck,
        zombie_parent=next(
            (pid for pid in (person.ppid, person.group, person.session) if pid in scan.zombies and pid != person.pid),
            None,
        ),
    )


def classify(person: Identity, roles: set[str]) -> str:
    """What kind of holder a process is, from its name, its unit and the devices it has open.

    A client that has the control and GPU nodes but not nvidia-uvm has no CUDA context: it manages or watches.
    """
    owner = person.owner
    names = (person.comm, owner.unit or "")
    if person.pid == 1 or person.comm == _LOGIND or owner.unit == f"{_LOGIND}.service":
        return SYSTEM
    if any(_DISPLAY.match(name) for name in names) and not (owner.container or owner.pod or owner.job):
        return SYSTEM
    if any(_MANAGEMENT.match(name) for name in names):
        return MANAGEMENT
    if "compute" in roles:
        return WORKLOAD
    if "control" in roles and "display" not in roles:
        return MANAGEMENT
    return UNKNOWN


def release(person: Identity, kind: str, stuck: str | None, container_name: str | None = None) -> Release:
    """What would make this process let go. Never to end PID 1 or logind, and never a PID that its manager restarts."""
    owner = person.owner
    if stuck:
        return Release(f"it waits in the kernel, in {stuck}, and cannot be ended; reboot, or power-cycle if that hangs")
    if person.pid == 1 or person.comm == _LOGIND or owner.unit == f"{_LOGIND}.service":
        return Release(
            "end the graphical session (systemctl isolate multi-user.target); if it keeps the device, reboot. "
            "Do not end this process",
            ("systemctl", "isolate", "multi-user.target"),
        )
    if owner.pod:
        return Release(f"cordon the node and evict the pod with uid {owner.pod}; its kubelet would restart a process")
    if owner.job:
        return Release(f"wait for job {owner.job}, or requeue it", ("scontrol", "requeue", owner.job))
    if owner.container:
        return _stop_container(owner, container_name)
    if person.comm.startswith("nvidia-cuda-mps"):
        return Release("end its clients, then tell the MPS control daemon to quit: echo quit | nvidia-cuda-mps-control")
    if owner.unit and owner.user_unit_of is not None:
        return Release(
            f"stop the unit {owner.unit} of its user",
            ("systemctl", "--user", f"--machine={owner.user_unit_of}@.host", "stop", owner.unit),
        )
    if owner.unit and owner.unit.endswith((".service", ".scope")) and not _NURSERY.fullmatch(owner.unit):
        advice = f"stop {owner.unit}, and start it again after the upgrade"
        return Release(advice, ("systemctl", "stop", owner.unit))
    whose = person.login or person.user
    where = f" in session {owner.session}" if owner.session else ""
    advice = "end it" if whose == "root" else f"have {whose} end it{where}, or end it"
    return Release(advice, ("kill", "-TERM", str(person.pid)))


def _stop_container(owner: Owner, name: str | None) -> Release:
    target = name or str(owner.container)[:12]
    tool = {"docker": "docker", "podman": "podman", "containerd": "nerdctl", "cri-o": "crictl"}.get(owner.runtime or "")
    if owner.user_unit_of is not None:
        return Release(f"have its user (uid {owner.user_unit_of}) stop the container {target}")
    if tool is None:
        return Release(f"stop the container {target} with the tool that started it; a restart policy may bring it back")
    return Release(f"stop the container {target}; ending the process may only make it restart", (tool, "stop", target))


def _module_holder(module: Module, modules: Mapping[str, Module]) -> Holder:
    uses = tuple(name for name, other in modules.items() if module.name in other.used_by)
    return Holder(
        KERNEL, module.name, (), uses, Release(f"unload {module.name} before what it uses", ("rmmod", module.name))
    )


def _unexplained(modules: Mapping[str, Module], held: Sequence[Holder]) -> dict[str, int]:
    """References that neither a module nor a device file explains. How many one file takes is not known, so a single
    process that has a device of the module explains all of them."""
    explained = {name for holder in held for name in holder.modules}
    if explained - {"nvidia"}:
        explained.add("nvidia")
    return {
        name: module.beyond_modules
        for name, module in modules.items()
        if module.beyond_modules > 0 and name not in explained
    }


def _suspended(
    scan: Scan, people: Mapping[int, Identity], probe: Probe, seconds: float
) -> tuple[list[Suspended], list[Finding]]:
    """Ask the driver about each process that maps libcuda and has no device open."""
    pids = sorted((scan.libraries.keys() - scan.uses.keys()) & people.keys())
    states = probe(pids, seconds) if pids and seconds > 0 else dict.fromkeys(pids, UNKNOWN)
    for pid in pids:
        if states.get(pid) == UNKNOWN and people[pid].state == "T":
            states = {**states, pid: STOPPED}
    found = [Suspended(people[pid], scan.libraries[pid], states[pid]) for pid in pids if states[pid] != "none"]
    findings = []
    for one in found:
        if one.state in _AT_STAKE:
            let_go_on = f"kill -CONT {one.process.pid}, then " if one.state == STOPPED else ""
            findings.append(
                Finding(
                    "holders.suspended",
                    ERROR,
                    f"PID {one.process.pid} {one.process.comm} uses CUDA and is {one.state}: it holds no device, but "
                    f"without this driver it can never go on",
                    {"pid": one.process.pid, "state": one.state},
                    f"{let_go_on}cuda-checkpoint --action restore --pid {one.process.pid} and --action unlock, "
                    f"or end it if its state is saved",
                )
            )
        elif one.state == UNKNOWN:
            findings.append(
                Finding(
                    "holders.suspended",
                    WARNING,
                    f"PID {one.process.pid} {one.process.comm} maps {one.library} but holds no device, and the driver "
                    f"did not say whether a CUDA checkpoint has suspended it",
                    {"pid": one.process.pid, "state": one.state},
                    f"cuda-checkpoint --get-state --pid {one.process.pid}",
                )
            )
    return found, findings


def _judge(
    modules: Mapping[str, Module],
    held: Sequence[Holder],
    unexplained: Mapping[str, int],
    scan: Scan,
    proc: Path,
    sys: Path,
) -> list[Finding]:
    findings = []
    for holder in held:
        if holder.blocked_in:
            findings.append(
                Finding(
                    "holders.stuck",
                    ERROR,
                    f"{holder.title} is in uninterruptible sleep inside the driver, in {holder.blocked_in}: "
                    f"the driver is wedged",
                    {"reboot": True, "pid": holder.process.pid if holder.process else None},
                    "reboot; power-cycle if the reboot hangs",
                )
            )
        elif holder.kind == SYSTEM and holder.process and holder.name in ("systemd", "init", _LOGIND):
            findings.append(
                Finding(
                    "holders.system",
                    ERROR,
                    f"{holder.title} has {', '.join(holder.devices)} open and must not be ended",
                    {"reboot": True, "pid": holder.process.pid},
                    holder.release.advice,
                )
            )
        if holder.zombie_parent:
            findings.append(_zombie(holder.zombie_parent, scan, holder))
    for module in modules.values():
        if module.permanent:
            findings.append(
                Finding(
                    "holders.permanent",
                    ERROR,
                    f"module {module.name} has no exit function; the kernel never lets it go",
                    {"reboot": True},
                    "reboot",
                )
            )
        if module.references is None or module.references < 0 or module.state.lower() in ("going", "unloading"):
            findings.append(
                Finding(
                    "holders.module_state",
                    ERROR,
                    f"module {module.name} is in state {module.state} with a count of {module.references}",
                    {"reboot": True},
                    "reboot",
                )
            )
    findings += [_unexplained_finding(name, count, scan, proc, sys, modules) for name, count in unexplained.items()]
    if unexplained:
        findings += [_zombie(pid, scan, None) for pid in sorted(scan.zombies)][:5]
    return findings


def _zombie(pid: int, scan: Scan, child: Holder | None) -> Finding:
    zombie = scan.zombies[pid]
    child_text = f"; what holds the driver is its child, {child.title}" if child else ""
    return Finding(
        "holders.zombie",
        WARNING,
        f"PID {pid} {zombie.comm} is a zombie: it cannot be ended and holds nothing itself{child_text}",
        {"pid": pid, "ppid": zombie.ppid},
        f"its parent, PID {zombie.ppid}, must reap it",
    )


def _unexplained_finding(
    name: str, count: int, scan: Scan, proc: Path, sys: Path, modules: Mapping[str, Module]
) -> Finding:
    where = f"module {name} has {count} reference{'s' if count > 1 else ''} that no module and no process explains"
    evidence: dict[str, Any] = {"module": name, "references": count}
    if scan.denied and os.geteuid() != 0:
        return Finding(
            "holders.unexplained", ERROR, f"{where}, but not every process could be seen", evidence, "run it as root"
        )
    consoles = _consoles(sys) if name == "nvidia_drm" else []
    strangers = sorted(
        other
        for other in kernel_modules.parse_modules(_read(proc / "modules"))
        if other not in modules and other.startswith(("nvidia_", "nv_", "nvfs", "gdr"))
    )
    if consoles:
        where += f"; the text console {', '.join(consoles)} is drawn by it"
        following = "; ".join(f"echo 0 > /sys/class/vtconsole/{console}/bind" for console in consoles) + "; or reboot"
    elif strangers:
        where += f"; {', '.join(strangers)} may hold it by looking up its symbols at run time"
        following = f"rmmod {' '.join(strangers)}, then try again; or reboot"
    elif name == "nvidia_drm":
        where += ": something inside the kernel holds a DRM node"
        following = "end graphical sessions (systemctl isolate multi-user.target), then try again; or reboot"
    else:
        following = "reboot"
    if not processes.in_initial_pid_namespace(str(proc)):
        following = f"look for the holder from outside this PID namespace first; {following}"
    return Finding("holders.unexplained", ERROR, where, {**evidence, "reboot": True}, following)


def _consoles(sys: Path) -> list[str]:
    """Text consoles bound to a frame buffer, if a frame buffer of an NVIDIA GPU is there."""
    if not any(_bound_to(entry) == "nvidia" for entry in sorted((sys / "class" / "graphics").glob("fb*"))):
        return []
    return [
        entry.name
        for entry in sorted((sys / "class" / "vtconsole").glob("vtcon*"))
        if "frame buffer" in _read(entry / "name") and _read(entry / "bind").strip() == "1"
    ]
