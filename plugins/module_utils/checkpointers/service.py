# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A systemd service whose processes are stopped, ended without being woken, and brought back from images.

The service manager must neither restart a service that stands still, nor wake it to end it (SIGTERM comes with
SIGCONT), nor run its stop commands: a drop-in says so for as long as that lasts. On the machine it moves to, another
drop-in lets CRIU be what the unit starts, so the restored processes are the unit's own, under its own name.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.host.systemd import Hold, Systemd

_QUERY = 30.0
_SHOWN = (
    "LoadState", "ActiveState", "SubState", "Result", "MainPID", "ControlGroup", "WatchdogUSec", "Type", "FragmentPath",
    "RootDirectory", "RootImage", "MemoryMax",
)  # fmt: skip
_QUIET = "Restart=no\nKillMode=control-group\nKillSignal=SIGKILL\nExecStop=\nExecStopPost=\nTimeoutStopSec=30\n"


class ServiceError(Exception):
    """systemd did not do what it was told; the text says what, and the next command."""


class Moved(Hold):
    """Keeps a unit that now runs on another machine from being started on this one, also by a reboot."""

    FILE = "zz-gpufleet-moved.conf"

    def lifting(self, unit: str) -> list[str]:
        """The command that does the same as :meth:`lift_one`, for whoever has nothing else."""
        return ["rm", "--force", "--", str(self._path(unit))]

    def lift_one(self, unit: str) -> bool:
        """Let ``unit`` be started here again; whether it was held."""
        path = self._path(unit)
        if not path.exists():
            return False
        path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        return True


def quoted(argv: Sequence[str]) -> str:
    """``argv`` as the value of ExecStart= (systemd.service(5), COMMAND LINES): no specifier, no variable, no escape."""
    words = []
    for word in argv:
        escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
        words.append(f'"{escaped}"')
    return " ".join(words)


def without_ours(text: str) -> str:
    """What ``systemctl cat`` prints, but for the files of this collection: they are about one machine and one move."""
    parts = re.split(r"^(?=# /)", text, flags=re.MULTILINE)
    return "".join(part for part in parts if not re.match(r"# \S*/zz-gpufleet-[^/\s]+\.conf$", part, re.MULTILINE))


class _Reloads:
    """Lets whoever waits for a reload that has not begun yet share it."""

    def __init__(self) -> None:
        self._running, self._counting = threading.Lock(), threading.Lock()
        self._asked = self._covered = 0

    def once(self, reload: Callable[[], None]) -> None:
        with self._counting:
            self._asked += 1
            mine = self._asked
        with self._running:
            if self._covered >= mine:
                return
            with self._counting:
                covers = self._asked
            reload()
            self._covered = covers


_reloads = _Reloads()


class Service:
    """One unit of type service. ``runtime`` is where drop-ins live that are gone after a reboot."""

    GUARD, RESTORE = "zz-gpufleet-frozen.conf", "zz-gpufleet-restore.conf"

    def __init__(
        self,
        run: Runner,
        unit: str,
        runtime: str = "/run/systemd/system",
        lasting: str = "/etc/systemd/system",
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self.unit = unit
        self._drop_ins = Path(runtime, f"{unit}.d")
        self.moved = Moved(Path(lasting), "Moved by gpufleet.driver: this work now runs on another machine.")
        self._sleep, self._monotonic = sleep, monotonic

    @property
    def guard_path(self) -> Path:
        return self._drop_ins / self.GUARD

    @property
    def timers(self) -> tuple[str, str]:
        """Two, so that one is always there when it starts anew; no other unit or container has one of that name."""
        return f"gpufleet-thaw-{self.unit}.1", f"gpufleet-thaw-{self.unit}.2"

    @property
    def status_command(self) -> str:
        """What somebody types to see how it is; the others: what it consists of, and what it has said."""
        return f"systemctl status {self.unit}"

    @property
    def members_command(self) -> str:
        return f"systemd-cgls -u {self.unit}"

    @property
    def log_command(self) -> str:
        return f"journalctl -u {self.unit}"

    def show(self) -> Mapping[str, str]:
        """Properties of the unit as text; :raises ServiceError: if systemd does not answer."""
        done = self._run(["systemctl", "show", f"--property={','.join(_SHOWN)}", "--", self.unit], timeout=_QUERY)
        if not done.ok:
            raise ServiceError(f"systemd does not answer ({done.describe()}); look at: systemctl is-system-running")
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    def fragment(self) -> str:
        """The text of the unit's own file and its drop-ins, but for ours, to start it where it does not exist."""
        done = self._run(["systemctl", "cat", "--", self.unit], timeout=_QUERY)
        return without_ours(done.stdout) if done.ok else ""

    def guard(self) -> None:
        """Keep systemd's hands off the unit's processes from now on."""
        self._place(self.GUARD, f"[Unit]\nConditionPathExists=!{self.guard_path}\n[Service]\n{_QUIET}")

    def unguard(self) -> None:
        self._drop(self.GUARD)

    def _place(self, name: str, text: str) -> None:
        path = self._drop_ins / name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.write_text(f"# Made by gpufleet.driver while this work is moved.\n{text}")
        self.reload()

    def _drop(self, name: str) -> None:
        path = self._drop_ins / name
        if path.exists():
            path.unlink()
            with contextlib.suppress(OSError):
                path.parent.rmdir()
            self.reload()

    def reload(self) -> None:
        """Have systemd read its units again; services that ask at the same time share the time it takes."""
        _reloads.once(self._reload)

    def _reload(self) -> None:
        done = self._run(["systemctl", "daemon-reload"], timeout=_QUERY * 4)
        if not done.ok:
            raise ServiceError(
                f"systemd did not read its units again ({done.describe()}); try: systemctl daemon-reload"
            )

    # -- the dead-man timer

    def arm(self, argv: Sequence[str], seconds: float) -> None:
        """Run ``argv`` in ``seconds``, whatever becomes of us, unless :meth:`disarm` comes first; a timer that is there
        already is stopped once the new one is set.

        :raises ServiceError: if it cannot be had; without it nothing may be frozen. One that was there still is.
        """
        names = [f"{name}.timer" for name in self.timers]
        shown = self._run(["systemctl", "is-active", "--", *names], timeout=_QUERY).stdout.split()
        old = [name for name, state in zip(names, shown) if state not in ("inactive", "failed", "unknown")]
        if len(old) > 1:
            self._run(["systemctl", "stop", "--", old.pop()], timeout=_QUERY)
        new = next(name for name in self.timers if f"{name}.timer" not in old)
        done = self._run(
            [
                "systemd-run", "--quiet", f"--unit={new}", f"--on-active={int(seconds)}s",
                "--timer-property=AccuracySec=1s", "--collect", "--property=Type=oneshot", "--", *argv,
            ],
            timeout=_QUERY,
        )  # fmt: skip
        if not done.ok:
            raise ServiceError(f"the timer that would let it go on could not be set ({done.describe()})")
        if old:
            self._run(["systemctl", "stop", "--", *old], timeout=_QUERY)

    def disarm(self) -> None:
        self._run(["systemctl", "stop", "--", *(f"{name}.timer" for name in self.timers)], timeout=_QUERY)

    # -- the end

    def end(self, alive: Callable[[], Sequence[int]], timeout: float) -> None:
        """End the unit by SIGKILL and see that its processes are gone; :raises ServiceError: if they are not."""
        done = self._run(["systemctl", "stop", "--", self.unit], timeout=timeout)
        deadline = self._monotonic() + timeout
        while alive() and self._monotonic() < deadline:
            self._sleep(0.1)
        left = alive()
        if left:
            said = "" if done.ok else f" ({done.describe()})"
            raise ServiceError(
                f"PIDs {', '.join(map(str, left))} of {self.unit} are still there after SIGKILL{said}; "
                f"see where they hang: cat /proc/{left[0]}/stack"
            )

    def reset(self) -> None:
        """Forget that it was killed, so that it counts as stopped and not as failed."""
        self._run(["systemctl", "reset-failed", "--", self.unit], timeout=_QUERY)

    def stop(self, timeout: float) -> Completed:
        """End it as its owner wants it to end."""
        return self._run(["systemctl", "stop", "--", self.unit], timeout=timeout)

    def start(self, timeout: float) -> bool:
        """Start it from its own state; whether it stays up."""
        systemd = Systemd(self._run, self._sleep)
        systemd.start(self.unit, timeout=timeout)
        return not systemd.wait_back([self.unit], 60.0)

    def last_words(self) -> str:
        return Systemd(self._run).last_words(self.unit)

    # -- the return

    def adopt(self, fragment: str) -> None:
        """Make a unit that does not exist here, until the next boot, from what its own machine has."""
        path = self._drop_ins.parent / self.unit
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.touch(mode=0o600)  # its own file may have secrets, and had modes that are not known here
        path.write_text(f"# Made by gpufleet.driver: this work was moved here.\n{fragment}")

    def start_from(self, argv: Sequence[str], pid_file: Path, identifier: str, timeout: float) -> Completed:
        """Start the unit with ``argv`` in place of its own command; what it forks becomes the unit's main process.
        ``identifier`` is a name that a process gave itself, so it may be anything."""
        identifier = re.sub(r"[^\w.-]", "_", identifier, flags=re.ASCII) or "_"
        self._place(
            self.RESTORE,
            f"[Service]\nType=forking\nPIDFile={pid_file}\nExecCondition=\nExecStartPre=\nExecStart=\n"
            f"ExecStart=+{quoted(argv)}\nExecStartPost=\nWatchdogSec=0\nTimeoutStartSec={int(timeout)}\n"
            f"SyslogIdentifier={identifier}\n{_QUIET}",
        )
        return self._run(["systemctl", "start", "--", self.unit], timeout=timeout + _QUERY)

    def settle(self) -> None:
        """The unit's own command again, for the next time it is started."""
        self._drop(self.RESTORE)

    def forget(self) -> None:
        """Take away what :meth:`start_from` made here of work that does not stay."""
        self.settle()
