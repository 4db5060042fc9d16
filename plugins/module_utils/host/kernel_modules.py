# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel modules of the NVIDIA driver: which are loaded, in what order they go, out and in again.

What belongs to the driver is what the kernel itself says uses ``nvidia``, under whatever name; nothing else is touched.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import NOT_FOUND_RC, Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, WARNING, Finding

ROOT = "nvidia"
REQUIRED = ("nvidia", "nvidia_uvm")
"""Without these no CUDA program runs; every other module of the family is an addition."""

_PERMANENT = "[permanent]"


@dataclass(frozen=True)
class Module:
    """One loaded module. ``references`` is the kernel's count, None where it keeps none (no unloading compiled in).

    The count is not a number of holders: one open file may take two. Only zero has a meaning, and how far it exceeds
    the number of modules in ``used_by``.
    """

    name: str
    references: int | None
    used_by: tuple[str, ...] = ()
    permanent: bool = False
    state: str = "Live"
    size: int = 0
    version: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def beyond_modules(self) -> int:
        """References that no dependent module explains: open files, mappings, or the kernel itself."""
        return max(0, (self.references or 0) - len(self.used_by))

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "references": self.references,
            "used_by": list(self.used_by),
            "permanent": self.permanent,
            "state": self.state.lower(),
            "version": self.version,
            "parameters": dict(self.parameters),
        }


def parse_modules(text: str) -> dict[str, Module]:
    """Parse /proc/modules; rows of lsmod, which end after the used-by column and may lack that, are understood too.

    ``nvidia 104067072 3 nvidia_uvm,gdrdrv, Live 0x0 (POE)``; ``-`` stands for no users, and for a count that the
    kernel does not keep; ``[permanent]`` among the users marks a module without an exit.
    """
    modules = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 3 or not fields[1].isdigit():
            continue
        name, size, count = fields[:3]
        users = [] if len(fields) < 4 else [user for user in fields[3].split(",") if user and user != "-"]
        modules[name] = Module(
            name=name,
            size=int(size),
            references=int(count) if re.fullmatch(r"-?\d+", count) else None,
            used_by=tuple(user for user in users if user != _PERMANENT),
            permanent=_PERMANENT in users,
            state=fields[4] if len(fields) > 4 else "Live",
        )
    return modules


def family(modules: Mapping[str, Module], root: str = ROOT) -> dict[str, Module]:
    """``root`` and every module that uses it, directly or through others, in the order of ``modules``."""
    members = {root} & modules.keys()
    waiting = list(members)
    while waiting:
        for user in modules[waiting.pop()].used_by:
            if user in modules and user not in members:
                members.add(user)
                waiting.append(user)
    return {name: module for name, module in modules.items() if name in members}


def unload_order(members: Mapping[str, Module]) -> list[str]:
    """Dependants first: a module comes after everything that uses it."""
    order: list[str] = []
    left = dict(members)
    while left:
        free = [name for name, module in left.items() if not set(module.used_by) & left.keys()]
        order += free or list(left)  # a circle cannot exist in the kernel; take what is left as it comes
        for name in free or list(left):
            del left[name]
    return order


def read_modules(proc: str = "/proc", sys: str = "/sys") -> dict[str, Module]:
    """The driver's modules that are loaded now, with what /sys/module knows of each. Empty if there is none."""
    try:
        text = Path(proc, "modules").read_text()
    except OSError:
        text = ""
    modules = parse_modules(text)
    waiting = [ROOT]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        directory = Path(sys, "module", name)
        if name not in modules:
            if not (directory / "initstate").exists():
                continue
            modules[name] = Module(name, None)
        modules[name] = _with_sysfs(modules[name], directory)
        waiting += modules[name].used_by
    return family(modules)


def _with_sysfs(module: Module, directory: Path) -> Module:
    holders = directory / "holders"
    users = {entry.name for entry in holders.iterdir()} if holders.is_dir() else set()
    count = _line(directory / "refcnt")
    return replace(
        module,
        references=int(count) if count and re.fullmatch(r"-?\d+", count) else module.references,
        used_by=(*module.used_by, *sorted(users - set(module.used_by))),
        version=_line(directory / "version"),
        state=_line(directory / "initstate") or module.state,
        parameters=_parameters(directory / "parameters"),
    )


def _parameters(directory: Path) -> dict[str, str]:
    if not directory.is_dir():
        return {}
    values = {entry.name: _line(entry) for entry in sorted(directory.iterdir())}
    return {name: value for name, value in values.items() if value is not None and value != "(null)"}


def _line(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").rstrip("\n")
    except OSError:
        return None


NOT_BUILT, SIGNATURE, VERSION_MAGIC, UNKNOWN_SYMBOL, NO_DEVICE, BLOCKED, TIMED_OUT, OTHER = (
    "not_built",
    "signature",
    "version_magic",
    "unknown_symbol",
    "no_device",
    "blocked",
    "timed_out",
    "other",
)
"""Why a module did not load."""

_REASONS = (
    (NOT_BUILT, r"not found in directory|No such file or directory"),
    (SIGNATURE, r"Key was rejected by service|Required key not available|[Kk]ey has (?:expired|been revoked)"),
    (SIGNATURE, r"Operation not permitted.*(?:[Ll]ockdown|unsigned)|Lockdown:.*unsigned module loading"),
    (VERSION_MAGIC, r"version magic|disagrees about version of symbol|Exec format error|Invalid module format"),
    (UNKNOWN_SYMBOL, r"Unknown symbol"),
    (NO_DEVICE, r"No such device"),
    (BLOCKED, r"Error running install command|Operation not permitted"),
)
_SENTENCES = {
    NOT_BUILT: "it is not built for the running kernel",
    SIGNATURE: "the kernel rejected its signature",
    VERSION_MAGIC: "it was built for another kernel",
    UNKNOWN_SYMBOL: "it needs symbols that the running kernel or the loaded nvidia module does not have",
    NO_DEVICE: "it found no device that it supports, or could not initialise one",
    BLOCKED: "modprobe's configuration or the kernel forbids it",
    TIMED_OUT: "it did not finish loading in time",
    OTHER: "modprobe failed",
}
_NEXT = {
    NOT_BUILT: "dkms status; install the headers of $(uname -r), or the module package for that kernel",
    SIGNATURE: "mokutil --list-enrolled and modinfo -F signer {name}; enrol the key, or use modules that the "
    "distribution signs",
    VERSION_MAGIC: "modinfo -F vermagic {name} and uname -r; rebuild the module, or boot the kernel it was built for",
    UNKNOWN_SYMBOL: "dmesg; check that all nvidia modules on disk are of one version, then depmod -a",
    NO_DEVICE: "dmesg | grep NVRM; check that this driver supports the GPU and the module flavour it needs",
    BLOCKED: "grep -r {name} /etc/modprobe.d /run/modprobe.d /lib/modprobe.d; cat /proc/sys/kernel/modules_disabled",
    TIMED_OUT: "dmesg; reboot if the module stays in state loading",
    OTHER: "modprobe -v {name}; dmesg",
}


def refusal(stderr: str, kernel_log: str = "") -> str:
    """Why modprobe failed, one of the reasons above, from what it said and what the kernel logged meanwhile.

    The kernel's log goes first: modprobe's "Invalid argument" or "No such device" may stand for any of them.
    """
    for text in (kernel_log, stderr):
        for reason, pattern in _REASONS:
            if re.search(pattern, text):
                return reason
    return OTHER


@dataclass(frozen=True)
class Action:
    """One command that was run (or would be): ``what`` is unload, load, reload or nodes."""

    what: str
    module: str
    argv: tuple[str, ...]
    ok: bool
    said: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.what, "module": self.module, "argv": list(self.argv), "ok": self.ok, "said": self.said}


@dataclass
class Outcome:
    """What unloading or loading did. ``failed`` is the module at which it stopped."""

    actions: list[Action] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    failed: str | None = None
    reboot_required: bool = False

    @property
    def ok(self) -> bool:
        return self.failed is None


class KernelModules:
    """Takes the driver's modules out and puts them in, each command bounded by ``timeout`` seconds."""

    def __init__(
        self, run: Runner, *, timeout: float = 60, proc: str = "/proc", sys: str = "/sys", dev: str = "/dev"
    ) -> None:
        self._run = run
        self._timeout = timeout
        self._proc = proc
        self._sys = sys
        self._dev = dev

    def read(self) -> dict[str, Module]:
        return read_modules(self._proc, self._sys)

    def node_problems(self) -> dict[str, str]:
        """Device nodes that are missing or stale, by path."""
        return node_problems(self._proc, self._dev)

    def unload(self) -> Outcome:
        """Remove every module of the family, dependants first; at the first refusal put back what was removed.

        rmmod, not ``modprobe -r``: that would also remove what the driver uses (drm_kms_helper, i2c_core) once idle.
        Never forced.
        """
        outcome = Outcome()
        before = self.read()
        removed: list[Module] = []
        for name in unload_order(before):
            if name not in self.read():
                continue
            done = self._act(outcome, "unload", name, ["rmmod", name])
            if done.ok or name not in self.read():
                removed.append(before[name])
                continue
            outcome.failed = name
            outcome.reboot_required = done.timed_out
            outcome.findings.append(self._refused(name, done))
            break
        else:
            back = sorted(self.read())
            if back:
                outcome.failed = back[0]
                outcome.findings.append(
                    Finding(
                        "modules.came_back",
                        ERROR,
                        f"{', '.join(back)} came back after all modules had been removed: something loads the driver "
                        f"on its own",
                        {"modules": back},
                        "stop what calls nvidia-modprobe or NVML (exporters, udev rules), then try again",
                    )
                )
        if outcome.failed and not outcome.reboot_required:
            self._reload(outcome, removed)
        return outcome

    def _refused(self, name: str, done: Completed) -> Finding:
        now = self.read().get(name)
        count = now.references if now else None
        if done.timed_out:
            return Finding(
                "modules.wedged",
                ERROR,
                f"rmmod {name} did not return within {self._timeout:.0f} s: the driver is wedged",
                {"module": name, "references": count},
                "reboot; power-cycle if the reboot hangs",
            )
        return Finding(
            "modules.refused",
            ERROR,
            f"the kernel refused to unload {name} (count {count}, used by {', '.join(now.used_by) if now else '-'}): "
            f"{done.describe()}",
            {"module": name, "references": count},
            f"see which process or module holds {name} in the list of holders",
        )

    def _reload(self, outcome: Outcome, removed: Sequence[Module]) -> None:
        """Put modules back as they were; parameters that modprobe's configuration does not set are given again."""
        for module in reversed(removed):
            if module.name in self.read():
                continue
            done = self._act(outcome, "reload", module.name, ["modprobe", module.name])
            now = self.read().get(module.name)
            if now is None:
                outcome.findings.append(self._not_loaded(module.name, done, "", ERROR))
                continue
            differing = {name: value for name, value in module.parameters.items() if now.parameters.get(name) != value}
            if not differing:
                continue
            options = [f"{name}={value}" for name, value in differing.items()]
            if self._act(outcome, "unload", module.name, ["rmmod", module.name]).ok:
                self._act(outcome, "reload", module.name, ["modprobe", module.name, *options])
            again = self.read().get(module.name)
            lost = {n: v for n, v in differing.items() if again is None or again.parameters.get(n) != v}
            if lost:
                outcome.findings.append(
                    Finding(
                        "modules.parameters",
                        WARNING,
                        f"{module.name} was put back without its parameters "
                        f"{', '.join(f'{name}={value}' for name, value in lost.items())}",
                        {"module": module.name, "parameters": lost},
                        f"rmmod {module.name}; modprobe {module.name} {' '.join(options)}",
                    )
                )

    def load(self, names: Iterable[str], required: Iterable[str] = REQUIRED) -> Outcome:
        """Load ``names`` in that order (what they depend on comes by itself) and make the device nodes.

        A module of ``required`` that does not load ends it with an error; any other is a warning, as the node then
        computes but lacks something it had.
        """
        outcome = Outcome()
        needed = {*required}
        for name in names:
            if name in self.read():
                continue
            logged = self._kernel_log()
            done = self._act(outcome, "load", name, ["modprobe", name])
            if name in self.read():
                continue
            fresh = "\n".join(line for line in self._kernel_log() if line not in set(logged))
            outcome.findings.append(self._not_loaded(name, done, fresh, ERROR if name in needed else WARNING))
            if name in needed:
                outcome.failed = name
                outcome.reboot_required = done.timed_out
                return outcome
        self._nodes(outcome)
        return outcome

    def _not_loaded(self, name: str, done: Completed, kernel_log: str, level: str) -> Finding:
        reason = TIMED_OUT if done.timed_out else refusal(done.stderr, kernel_log)
        lines = [line for line in kernel_log.splitlines() if re.search(r"NVRM|nvidia|module|" + re.escape(name), line)]
        said = done.stderr.strip().splitlines()[-1:] if not done.ok else ["modprobe reported success"]
        detail = "; ".join([*said, *lines[-2:]])
        degraded = "" if level == ERROR else "; the node computes without it, but lacks it"
        return Finding(
            "modules.not_loaded",
            level,
            f"{name} did not load: {_SENTENCES[reason]} ({detail}){degraded}",
            {"module": name, "reason": reason, "kernel_log": lines[-10:]},
            _NEXT[reason].format(name=name),
        )

    def _kernel_log(self) -> list[str]:
        done = self._run(["dmesg"], timeout=10)
        return done.stdout.splitlines() if done.ok else []

    def _nodes(self, outcome: Outcome) -> None:
        """Make the device nodes as NVIDIA's own tool does, and check that their numbers are those of this load:
        nodes survive the module, but a dynamic major may change."""
        if "nvidia" not in self.read():
            return
        wrong = self.node_problems()
        if not wrong:
            return
        tool = self._act(outcome, "nodes", "nvidia", ["nvidia-modprobe", "-u", "-c=0"])
        for minor in range(1, 1 + max((int(word) for word in re.findall(r"nvidia(\d+)", " ".join(wrong))), default=0)):
            if tool.ok:
                self._act(outcome, "nodes", "nvidia", ["nvidia-modprobe", f"-c={minor}"])
        left = self.node_problems()
        if tool.rc == NOT_FOUND_RC:
            left = {path: f"{problem}, and nvidia-modprobe is not installed" for path, problem in left.items()}
        for path, problem in left.items():
            outcome.findings.append(
                Finding(
                    "modules.node",
                    ERROR,
                    f"{path} {problem}",
                    {"path": path},
                    f"rm -f {path}; nvidia-modprobe -u -c=0",
                )
            )
            outcome.failed = outcome.failed or "nvidia"

    def _act(self, outcome: Outcome, what: str, module: str, argv: Sequence[str]) -> Completed:
        done = self._run(argv, timeout=self._timeout)
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        outcome.actions.append(Action(what, module, tuple(argv), done.ok, said[-1] if said else ""))
        return done


def node_problems(proc: str = "/proc", dev: str = "/dev") -> dict[str, str]:
    """Device nodes that are missing or have numbers of an earlier load, by path; nothing is said where the kernel's
    /proc/devices does not name the driver."""
    majors: dict[str, int] = {}
    for row in re.findall(r"^ *(\d+) (\S+)$", (_line(Path(proc, "devices")) or "").partition("Block")[0], re.MULTILINE):
        majors.setdefault(row[1], int(row[0]))
    front = majors.get("nvidia", majors.get("nvidia-frontend", majors.get("nvidiactl")))
    wanted: dict[str, tuple[int, int]] = {}
    if front is not None:
        wanted["nvidiactl"] = (front, 255)
        wanted.update({f"nvidia{minor}": (front, minor) for minor in _gpu_minors(Path(proc))})
    if "nvidia-uvm" in majors:
        wanted["nvidia-uvm"] = (majors["nvidia-uvm"], 0)
    problems = {}
    for name, number in wanted.items():
        try:
            about = Path(dev, name).stat()
        except OSError:
            problems[f"/dev/{name}"] = "is missing"
            continue
        seen = (os.major(about.st_rdev), os.minor(about.st_rdev))
        if not stat.S_ISCHR(about.st_mode) or seen != number:
            problems[f"/dev/{name}"] = (
                f"has the numbers {seen[0]}:{seen[1]}, but the loaded driver has {number[0]}:{number[1]}"
            )
    return problems


def _gpu_minors(proc: Path) -> list[int]:
    texts = [_line(path) or "" for path in sorted(proc.glob("driver/nvidia/gpus/*/information"))]
    return [int(found[1]) for text in texts if (found := re.search(r"Device Minor:\s*(\d+)", text))]
