# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A machine that answers in the place of execution.run: systemd units, containers, DCGM.

Its systemctl does what systemd 252 was seen to do in an nspawn container: holds, triggers, propagation of a stop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed


class Crash(BaseException):
    """The process ends here, as by SIGKILL."""


@dataclass
class FakeUnit:
    active: str = "inactive"
    names: tuple[str, ...] = ()
    file_state: str = "enabled"
    type: str = "simple"
    result: str = "success"
    requires: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    stuck: bool = False
    broken: bool = False
    """It fails as soon as it is started."""
    drop_ins: tuple[str, ...] = ()


@dataclass
class FakeContainer:
    running: bool = True
    policy: str = "no"
    labels: dict[str, str] = field(default_factory=dict)
    auto_remove: bool = False
    broken: bool = False


class Machine:
    def __init__(self, tmp_path: Path, units: dict[str, FakeUnit], containers: dict[str, FakeContainer] | None = None):
        self.units = units
        self.containers = containers or {}
        self.hold_directory = tmp_path / "units"
        self.calls: list[tuple[str, ...]] = []
        self.answers: dict[str, Completed] = {}
        self.crash_after: int | None = None
        self.policies_can_change = True
        self.clock = 0.0

    # what a test looks at

    def states(self) -> dict[str, str]:
        return {name: unit.active for name, unit in sorted(self.units.items())}

    def done(self, *verb: str) -> list[str]:
        """Last arguments of the calls that begin with ``verb``, in order."""
        return [call[-1] for call in self.calls if call[: len(verb)] == verb]

    def start_by_others(self) -> None:
        """What sockets, udev, packages' scripts and people do all the time."""
        for name in self.units:
            self._start(name)

    # time

    def monotonic(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    # commands

    def run(self, argv: Sequence[str], *, timeout: float, env: Any = None, stdin: Any = None) -> Completed:
        call = tuple(argv)
        self.calls.append(call)
        if call[0] == "systemctl" and call[1] in ("show", "list-units"):
            return self._answer(call, 0, self._show(call) if call[1] == "show" else self._list(call))
        if call[1:3] == ("container", "inspect"):
            return self._inspect(call)
        if self.crash_after is not None:
            if self.crash_after == 0:
                raise Crash
            self.crash_after -= 1
        for prefix, answer in self.answers.items():
            if " ".join(call).startswith(prefix):
                return answer
        if call[0] == "systemctl":
            return self._systemctl(call)
        if call[0] in ("podman", "docker"):
            return self._engine(call)
        return self._answer(call, 127)

    def _answer(self, call: tuple[str, ...], rc: int, stdout: str = "", stderr: str = "") -> Completed:
        return Completed(call, rc, stdout, stderr, 0.0)

    def _find(self, name: str) -> str | None:
        return next((true for true, unit in self.units.items() if name == true or name in unit.names), None)

    def _show(self, call: tuple[str, ...]) -> str:
        blocks = []
        for asked in call[call.index("--") + 1 :]:
            name = self._find(asked)
            unit = self.units[name] if name else FakeUnit(file_state="", type="")
            true = name or asked
            dependents = [other for other, its in self.units.items() if true in its.requires]
            triggered = [other for other, its in self.units.items() if true in its.triggers]
            sub = {"active": "running", "failed": "failed", "activating": "auto-restart"}.get(unit.active, "dead")
            blocks.append(
                f"Type={unit.type}\nResult={unit.result}\nId={true}\nNames={' '.join((true, *unit.names))}\n"
                f"RequiredBy={' '.join(dependents)}\nBoundBy=\nConsistsOf=\nTriggeredBy={' '.join(triggered)}\n"
                f"LoadState={'loaded' if name else 'not-found'}\nActiveState={unit.active}\nSubState={sub}\n"
                f"UnitFileState={unit.file_state}\nDropInPaths={' '.join(unit.drop_ins)}\n"
            )
        return "\n".join(blocks)

    def _list(self, call: tuple[str, ...]) -> str:
        patterns = call[call.index("--") + 1 :]
        names = [name for name in self.units if any(fnmatchcase(name, pattern) for pattern in patterns)]
        return "".join(f"{name} loaded {self.units[name].active} x A service\n" for name in names)

    def _systemctl(self, call: tuple[str, ...]) -> Completed:
        verb, name = call[1], self._find(call[-1])
        if verb == "daemon-reload":
            for true, unit in self.units.items():
                unit.drop_ins = tuple(map(str, self.hold_directory.glob(f"{true}.d/*.conf")))
        elif name is None:
            return self._answer(call, 5, "", f"Unit {call[-1]} not loaded.")
        elif verb == "stop":
            self._stop(name)
        elif verb == "start":
            return self._answer(call, 0 if self._start(name) else 1)
        elif verb in ("enable", "disable"):
            self.units[name].file_state = f"{verb}d"
        return self._answer(call, 0)

    def _stop(self, name: str) -> None:
        unit = self.units[name]
        if unit.stuck:
            unit.active = "deactivating"
        elif unit.active != "failed":
            unit.active = "inactive"
        for other, its in self.units.items():
            if name in its.requires and its.active == "active":
                self._stop(other)

    def _start(self, name: str) -> bool:
        unit = self.units[name]
        if any(Path(path).exists() for path in unit.drop_ins):
            return True  # a condition that is not met is no failure
        if unit.active == "deactivating":
            return False  # the start waits behind the stop, and systemctl is ended at its deadline
        if name.endswith(".socket") and any(self.units[one].active == "active" for one in unit.triggers):
            return unit.active == "active"  # "Socket service ... already active, refusing."
        for required in unit.requires:
            self._start(required)
        unit.active = "failed" if unit.broken else "active"
        unit.result = "exit-code" if unit.broken else "success"
        return not unit.broken

    def _inspect(self, call: tuple[str, ...]) -> Completed:
        container = self._container(call)
        if container is None:
            return self._answer(call, 1, "[]", f"Error: No such container: {call[-1]}")
        policy, dummy, retries = container.policy.partition(":")
        content = {
            "Id": call[-1].rstrip("0").ljust(64, "0"),
            "State": {"Running": container.running, "Status": "running" if container.running else "exited"},
            "HostConfig": {
                "RestartPolicy": {"Name": policy, "MaximumRetryCount": int(retries or 0)},
                "AutoRemove": container.auto_remove,
            },
            "Config": {"Labels": container.labels},
        }
        return self._answer(call, 0, json.dumps([content]))

    def _container(self, call: tuple[str, ...]) -> FakeContainer | None:
        """By name or full id, which is the name padded with zeros; all belong to docker."""
        return self.containers.get(call[-1].rstrip("0")) if call[0] == "docker" else None

    def _engine(self, call: tuple[str, ...]) -> Completed:
        container = self._container(call)
        if container is None:
            return self._answer(call, 1, "", f"Error: No such container: {call[-1]}")
        if call[1] == "stop":
            container.running = False
        elif call[1] == "start":
            container.running = not container.broken
        elif call[1] == "update":
            if not self.policies_can_change:
                return self._answer(call, 125, "", "Error: unknown flag: --restart")
            container.policy = call[2].partition("=")[2]
        return self._answer(call, 0)
