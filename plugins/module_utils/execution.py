# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a command, or a function, under a deadline that holds even when the driver is wedged.

A process stuck inside the NVIDIA driver is in uninterruptible sleep: SIGKILL does not end it, and whoever waits
for it hangs too. Everything here therefore stops waiting after the deadline and leaves such a child to the kernel.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

DEADLINE_RC = 124
"""Exit status reported for a command that ran past its deadline, as coreutils' timeout does."""

NOT_FOUND_RC = 127
"""Exit status reported for a program that is not installed, as a shell does."""

_GRACE = 2.0
_COMMAND_SHOWN = 120
"""Characters of a command in a message; a list of packages can be very long."""


@dataclass(frozen=True)
class Completed:
    """What a command did. ``rc`` is 124 past the deadline and 127 if the program is missing."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.rc == 0

    def describe(self) -> str:
        """One line for an error message: the command, its status, and the last line it printed; of apt, which ends with
        what it could not do, all the errors before that too."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        said = "; ".join(dict.fromkeys(line for line in lines if line.startswith("E: "))) or (
            lines[-1] if lines else ""
        )
        status = f"no answer within {self.seconds:.0f} s" if self.timed_out else f"rc {self.rc}"
        command = " ".join(self.argv)
        shown = command if len(command) <= _COMMAND_SHOWN else f"{command[:_COMMAND_SHOWN]}…"
        return f"{shown}: {status}" + (f": {said}" if said else "")


@dataclass(frozen=True)
class Outcome:
    """What a function run by :func:`call` did: its value, or the text of its error, or that it never returned."""

    value: Any = None
    error: str | None = None
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and not self.timed_out


Runner = Callable[..., Completed]
"""The signature of :func:`run`; backends take one so that tests can answer in its place."""


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> Completed:
    """Run ``argv`` without a shell, in its own session and the C locale, for at most ``timeout`` seconds.

    The own session keeps a package manager alive when the SSH connection that started it goes away. Output goes to
    files, not pipes, so that a daemon that inherits them (a package's postinst may start one) cannot block us.
    """
    started = time.monotonic()
    environment = {**os.environ, "LC_ALL": "C", "LANGUAGE": "", **(env or {})}
    # rmmod and modprobe are there, and a path that sudo or su sets may leave it out
    environment["PATH"] = f"{environment.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
        if stdin is not None:
            given.write(stdin.encode())
            given.seek(0)
        try:
            # AnsibleModule.run_command waits for ever for a child that cannot be killed
            child = subprocess.Popen(  # pylint: disable=ansible-bad-function
                list(argv), stdin=given, stdout=out, stderr=err, env=environment, start_new_session=True, close_fds=True
            )
        except FileNotFoundError:
            return Completed(tuple(argv), NOT_FOUND_RC, "", f"{argv[0]}: not found", 0.0)
        except OSError as exc:
            return Completed(tuple(argv), 126, "", f"{argv[0]}: {exc.strerror}", 0.0)
        timed_out = False
        try:
            rc = child.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out, rc = True, DEADLINE_RC
            _end(child)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
    return Completed(tuple(argv), rc, texts[0], texts[1], time.monotonic() - started, timed_out)


def _end(child: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except (ProcessLookupError, PermissionError):
            return
        try:
            child.wait(_GRACE)
            return
        except subprocess.TimeoutExpired:
            continue


def call(function: Callable[..., Any], *args: Any, timeout: float) -> Outcome:
    """Call ``function(*args)`` in a forked child for at most ``timeout`` seconds; its value must be picklable.

    For code that enters the driver (ctypes on libnvidia-ml or libcuda): such a call can hang or crash, and must then
    be a finding, not the end of the module.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(function, args, write_end)
    os.close(write_end)
    data = b""
    deadline = time.monotonic() + timeout
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        while True:
            ready, dummy, dummy = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                _reap(pid, kill=True)
                return Outcome(timed_out=True)
            chunk = pipe.read(65536)
            if not chunk:
                break
            data += chunk
    status = _reap(pid, kill=False)
    if not data:
        ending = f"signal {os.WTERMSIG(status)}" if status is not None and os.WIFSIGNALED(status) else "no result"
        return Outcome(error=f"ended with {ending}")
    value, error = pickle.loads(data)  # noqa: S301 - written by our own child through a private pipe
    return Outcome(value=value, error=error)


def _child(function: Callable[..., Any], args: tuple[Any, ...], write_end: int) -> None:
    value, error = None, None
    try:
        os.setsid()
        value = function(*args)
    except BaseException as exc:
        error = f"{type(exc).__name__}: {exc}"
    try:
        data = pickle.dumps((value, error))
        view = memoryview(data)
        while view:
            view = view[os.write(write_end, view) :]
    finally:
        os._exit(0)


def _reap(pid: int, *, kill: bool) -> int | None:
    if kill:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
    end = time.monotonic() + _GRACE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    return None
