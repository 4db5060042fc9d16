# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Suspend processes that use CUDA and let them go on, through the checkpoint calls of the NVIDIA driver.

This file is also copied to the node and run there by itself, so it imports nothing but the standard library:

- as the child that enters the driver (``suspend.py ACTION PID...``): a call that hangs is then a child to be ended;
- by the dead-man timer (``suspend.py thaw RECORD``): a controller that disappears must not leave work frozen for ever.

Every start counts while work stands still, so what takes long to import is imported where it is used.

The calls are cuCheckpointProcess* of libcuda (driver 570 and later), or ``cuda-checkpoint`` where a driver has only
that (555 and later). They act on another process, which needs root or the right to trace it.

Private to this collection: may change in any release.
"""

# it runs by itself on the node, where there is no AnsibleModule
# pylint: disable=ansible-bad-function

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Callable

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"
NO_CUDA, BUSY, UNKNOWN = "none", "busy", "unknown"
STATES = (RUNNING, LOCKED, CHECKPOINTED, FAILED, BUSY, BUSY)
"""By the number cuCheckpointProcessGetState answers; 4 and 5 (checkpointing, restoring) came with CUDA 13.4."""

NOT_INITIALIZED, OUT_OF_MEMORY, NOT_READY, NOT_SUPPORTED = 3, 2, 600, 801
NO_CALL = -1
"""Code for a driver that has neither the calls nor the command."""

FROZEN, PUBLISHED, COMMITTING, THAWED = "frozen", "published", "committing", "thawed"
"""States of a record in which its processes stand still, the last of them for whoever ends the work; and the one a thaw
leaves behind."""

PATIENCE = 60.0
"""Seconds for which an engine that does not go on is asked again."""


class _LockArgs(ctypes.Structure):
    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7)]


class _Pair(ctypes.Structure):
    _fields_ = [("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16)]


class _RestoreArgs(ctypes.Structure):
    _fields_ = [
        ("pairs", ctypes.POINTER(_Pair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * (64 - ctypes.sizeof(ctypes.c_void_p) - ctypes.sizeof(ctypes.c_uint))),
    ]


def uuid_bytes(uuid: str) -> bytes:
    """``GPU-5ca1ab1e-…`` as 16 bytes; :raises ValueError: if it is no UUID of a GPU."""
    digits = uuid[len("GPU-") :].replace("-", "") if uuid.startswith("GPU-") else ""
    if len(digits) != 32:
        raise ValueError(f"{uuid!r} is not the UUID of a GPU")
    return bytes.fromhex(digits)


class Library:
    """The calls in libcuda. A process that is not initialised is not by itself told from one without CUDA: the real
    driver says 3 for both, so the caller is initialised once and asks again."""

    def __init__(self, name: str = "libcuda.so.1") -> None:
        self._cuda = ctypes.CDLL(name)
        self._cuda.cuCheckpointProcessRestore  # noqa: B018 - AttributeError for a driver that has no such call
        self._initialised = False
        self._guard = threading.Lock()

    def _call(self, function: str, *args: Any) -> int:
        code = int(getattr(self._cuda, function)(*args))
        if code == NOT_INITIALIZED and self._initialise():
            code = int(getattr(self._cuda, function)(*args))
        return code

    def _initialise(self) -> bool:
        with self._guard:
            first = not self._initialised
            if first:
                self._initialised = self._cuda.cuInit(0) == 0
            return self._initialised

    def thread(self, pid: int) -> tuple[int, int | None]:
        tid = ctypes.c_int()
        code = self._call("cuCheckpointProcessGetRestoreThreadId", ctypes.c_int(pid), ctypes.byref(tid))
        return code, tid.value if code == 0 else None

    def state(self, pid: int) -> tuple[int, str]:
        value = ctypes.c_int(-1)
        code = self._call("cuCheckpointProcessGetState", ctypes.c_int(pid), ctypes.byref(value))
        if code:
            return code, NO_CUDA if code == NOT_INITIALIZED else UNKNOWN
        return 0, STATES[value.value] if 0 <= value.value < len(STATES) else UNKNOWN

    def lock(self, pid: int, timeout: float) -> int:
        args = _LockArgs(max(1, int(timeout * 1000)))
        return self._call("cuCheckpointProcessLock", ctypes.c_int(pid), ctypes.byref(args))

    def checkpoint(self, pid: int) -> int:
        reserved = (ctypes.c_uint64 * 8)()
        return self._call("cuCheckpointProcessCheckpoint", ctypes.c_int(pid), ctypes.byref(reserved))

    def restore(self, pid: int, pairs: dict[str, str]) -> int:
        args = _RestoreArgs()
        table = (_Pair * len(pairs))()
        for row, (old, new) in zip(table, pairs.items()):
            row.old[:] = list(uuid_bytes(old))
            row.new[:] = list(uuid_bytes(new))
        if pairs:
            args.pairs, args.count = table, len(pairs)
        self._initialise()  # or the GPUs must be in persistence mode
        return self._call("cuCheckpointProcessRestore", ctypes.c_int(pid), ctypes.byref(args))

    def unlock(self, pid: int) -> int:
        reserved = (ctypes.c_uint64 * 8)()
        return self._call("cuCheckpointProcessUnlock", ctypes.c_int(pid), ctypes.byref(reserved))


class Command:
    """The same through NVIDIA's command, which tells failures in words only: any is code 304 here."""

    NAME = "cuda-checkpoint"

    def __init__(self, name: str = NAME) -> None:
        self._name = name
        shown = subprocess.run([name, "--help"], capture_output=True, text=True, timeout=30, check=False)
        if "--action" not in shown.stdout + shown.stderr:
            raise OSError(f"{name} has no --action: this driver can only toggle, which is not safe to repeat")

    def _run(self, *words: str) -> tuple[int, str]:
        done = subprocess.run([self._name, *words], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return 0, done.stdout.strip().lower()
        said = (done.stdout + done.stderr).lower()
        if "initialization error" in said:
            return NOT_INITIALIZED, said
        return (NOT_SUPPORTED if "not supported" in said else OUT_OF_MEMORY if "out of memory" in said else 304), said

    def thread(self, pid: int) -> tuple[int, int | None]:
        code, said = self._run("--get-restore-tid", "--pid", str(pid))
        return code, int(said) if code == 0 and said.isdigit() else None

    def state(self, pid: int) -> tuple[int, str]:
        code, said = self._run("--get-state", "--pid", str(pid))
        if code:
            return code, NO_CUDA if code == NOT_INITIALIZED else UNKNOWN
        return 0, said if said in STATES else UNKNOWN

    def lock(self, pid: int, timeout: float) -> int:
        return self._run("--action", "lock", "--pid", str(pid), "--timeout", str(max(1, int(timeout * 1000))))[0]

    def checkpoint(self, pid: int) -> int:
        return self._run("--action", "checkpoint", "--pid", str(pid))[0]

    def restore(self, pid: int, pairs: dict[str, str]) -> int:
        table = ["--device-map", ",".join(f"{old}={new}" for old, new in pairs.items())] if pairs else []
        return self._run("--action", "restore", "--pid", str(pid), *table)[0]

    def unlock(self, pid: int) -> int:
        return self._run("--action", "unlock", "--pid", str(pid))[0]


def driver() -> Any:
    """The library, or else the command; :raises OSError: if this driver has neither."""
    try:
        return Library()
    except (OSError, AttributeError) as exc:
        try:
            return Command()
        except OSError as other:
            raise OSError(f"libcuda: {exc}; cuda-checkpoint: {other}") from other


Said = dict[str, Any]
"""What became of one process: pid, code (0 is success, CUDA's else), state, and tid for ``look``."""


def act(calls: Any, action: str, pid: int, timeout: float, pairs: dict[str, str]) -> Said:
    """One action on one process; the state is read afterwards, for a code alone proves nothing."""
    tid = None
    if action == "look":
        code, tid = calls.thread(pid)
        if code:
            return {"pid": pid, "code": code, "state": NO_CUDA if code == NOT_INITIALIZED else UNKNOWN, "tid": None}
    elif action == "lock":
        code = calls.lock(pid, timeout)
    elif action == "checkpoint":
        code = calls.checkpoint(pid)
    elif action == "restore":
        code = calls.restore(pid, pairs)
    else:
        code = calls.unlock(pid)
    seen, state = calls.state(pid)
    return {"pid": pid, "code": code, "state": state if seen == 0 else UNKNOWN, "tid": tid}


def act_on_all(
    action: str,
    pids: list[int],
    timeout: float,
    pairs: dict[str, str],
    say: Callable[[Said], None],
) -> None:
    """The action on every process at the same time; each answer is said as soon as it is there."""
    try:
        calls = driver()
    except OSError as exc:
        for pid in pids:
            say({"pid": pid, "code": NO_CALL, "state": UNKNOWN, "tid": None, "error": str(exc)})
        return
    guard = threading.Lock()

    def one(pid: int) -> None:
        said = act(calls, action, pid, timeout, pairs)
        with guard:
            say(said)

    threads = [threading.Thread(target=one, args=(pid,), daemon=True) for pid in pids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- the record of a workload that stands still ----------------------------------------------------------------------


def start_of(pid: int, proc: str = "/proc") -> int | None:
    """When a process was started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        text = Path(proc, str(pid), "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def stands_still(pid: int, proc: str = "/proc") -> bool:
    """Whether a process is stopped by a signal (state T)."""
    try:
        text = Path(proc, str(pid), "stat").read_text(errors="replace")
    except OSError:
        return False
    return text[text.rindex(")") + 2] == "T"


def pids_of(cgroup: str, sys_root: str = "/sys") -> list[int]:
    """Processes of a service's control group and of those below it, in version 2 or in systemd's own hierarchy."""
    found: list[int] = []
    if not cgroup.strip("/"):
        return found
    places = [Path(sys_root, "fs/cgroup", hierarchy, cgroup.strip("/")) for hierarchy in ("", "unified", "systemd")]
    for folder, dummy, names in os.walk(next((place for place in places if place.is_dir()), places[0])):
        if "cgroup.procs" in names:
            with contextlib.suppress(OSError):  # it may just end
                found += [int(word) for word in Path(folder, "cgroup.procs").read_text().split()]
    return sorted(found)


def same(members: Iterable[Mapping[str, Any]], proc: str = "/proc") -> list[int]:
    """PIDs of the members that are still the processes they were."""
    return [int(one["pid"]) for one in members if start_of(int(one["pid"]), proc) == one["start"]]


_locks: set[int] = set()


def _let_go() -> None:
    """In a child that is forked: one that hangs in the driver for ever must not keep the locks of its parent."""
    for descriptor in _locks:
        os.close(descriptor)


os.register_at_fork(after_in_child=_let_go)


def stands(record: Mapping[str, Any], proc: str = "/proc") -> bool:
    """Whether every process of a record is there and stands still, and nobody has begun to kill them."""
    alive = same(record["members"], proc)
    return (
        bool(alive)
        and not record.get("killing")
        and len(alive) == len(record["members"])
        and all(stands_still(pid, proc) for pid in alive)
    )


@contextlib.contextmanager
def held(path: Path, timeout: float = 30.0) -> Any:
    """Hold a record for a change; whoever stops, thaws or ends the work holds it meanwhile.

    :raises TimeoutError: if somebody else holds it for longer.
    """
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _locks.add(descriptor)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process has held {path}.lock for {timeout:.0f} s") from None
                time.sleep(0.05)
        yield
    finally:
        _locks.discard(descriptor)
        os.close(descriptor)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace a record in one step: it is as before or as now, also after a power cut or on a full disk."""
    import tempfile

    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as stream:
            json.dump(record, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_record(path: Path) -> dict[str, Any]:
    """The record, empty if there is none; :raises ValueError: if it is damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}


def dumper_of(pid: int, proc: str = "/proc") -> int | None:
    """The PID of the CRIU that traces a process, as it does from the beginning of a dump to its end."""
    try:
        status = Path(proc, str(pid), "status").read_text(errors="replace")
        tracer = int(re.findall(r"^TracerPid:\s+(\d+)$", status, re.MULTILINE)[0])
        name = Path(proc, str(tracer), "comm").read_text(errors="replace")
    except (OSError, IndexError):
        return None
    return tracer if name.startswith("criu") else None


def end_of_dump(pids: list[int], patience: float) -> None:
    """Wait for a CRIU whose module was killed: it would leave stopped what has been let go on. One that takes longer
    than ``patience`` seconds is ended."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline + 5.0:
        dumpers = {dumper for dumper in map(dumper_of, pids) if dumper}
        if not dumpers:
            return
        if time.monotonic() >= deadline:
            for dumper in dumpers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dumper, signal.SIGKILL)
        time.sleep(0.1)


def run_again(
    record: dict[str, Any], ask: Callable[..., list[Said]], sys_root: str = "/sys", patience: float = 60.0
) -> dict[int, str]:
    """Let the processes of a record go on from wherever they are; their states afterwards.

    ``ask(action, pids, pairs)`` enters the driver. The threads must run before the driver can be asked for anything.
    CRIU stops also what the work started after its processes were written down. A process in which the driver is still
    at work is waited for, ``patience`` seconds. One that is said to run is asked to as well, in case that is not true.
    """
    alive = same(record["members"])
    end_of_dump(alive, patience)
    for pid in {*alive, *pids_of(record.get("cgroup", ""), sys_root)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    cuda = [int(one["pid"]) for one in record["members"] if one.get("cuda") and int(one["pid"]) in alive]
    states = {said["pid"]: said["state"] for said in ask("look", cuda, {})} if cuda else {}
    deadline = time.monotonic() + patience
    while BUSY in states.values() and time.monotonic() < deadline:
        time.sleep(0.5)
        busy = [pid for pid, state in states.items() if state == BUSY]
        states.update({said["pid"]: said["state"] for said in ask("look", busy, {})})
    for action, before in (("restore", (CHECKPOINTED, RUNNING)), ("unlock", (LOCKED, RUNNING, UNKNOWN))):
        pids = [pid for pid in cuda if states.get(pid, UNKNOWN) in before]
        for said in ask(action, pids, {}) if pids else ():
            if (states.get(said["pid"]), said["state"]) != (RUNNING, UNKNOWN):
                states[said["pid"]] = said["state"]
    return {pid: states.get(pid, UNKNOWN) for pid in cuda}


def request(method: str, url: str, body: Any = None, token_file: str | None = None, timeout: float = 30.0) -> bytes:
    """Speak HTTP to this machine, past every proxy, and follow nobody elsewhere; the body of the answer.

    ``body`` is sent as JSON; ``token_file`` holds a bearer token.

    :raises OSError: if there is no answer in time, or one that is no success.
    """
    import http.client  # these take longer than a call of the driver does, and most children make none of these
    import urllib.request

    class Direct(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *dummy: Any) -> None:
            return None

    if not url.startswith(("http://", "https://")):
        raise OSError(f"{url!r} is not the URL of a web server")
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if token_file:
        headers["Authorization"] = f"Bearer {Path(token_file).read_text().strip()}"
    data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
    asked = urllib.request.Request(url, data=data, headers=headers, method=method)  # noqa: S310 - looked at above
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Direct())
    try:
        with opener.open(asked, timeout=timeout) as answer:
            return bytes(answer.read())
    except (http.client.HTTPException, ValueError) as exc:
        raise OSError(f"{type(exc).__name__}: {exc}") from exc


def wake(record: dict[str, Any]) -> str:
    """Have an engine that was paused go on, asking again for a while; what went wrong, empty if nothing did. What it
    has not done stays in the record."""
    deadline, pause = time.monotonic() + PATIENCE, 0.5
    while record.get("wake"):
        left, wrong = [], ""
        for call in record["wake"]:
            try:
                request("POST", call["url"], call["body"], call["token_file"], call["timeout"])
            except OSError as exc:
                left.append(call)
                wrong = wrong or f"{call['url']}: {exc}"
        record["wake"] = left
        if left and time.monotonic() + pause >= deadline:
            return wrong
        time.sleep(pause if left else 0)
        pause = min(2 * pause, 10.0)
    return ""


def tidy(record: dict[str, Any]) -> None:
    """Take away what kept the service manager from acting on the stopped unit, and from starting it again."""
    if record.get("lift"):
        subprocess.run(record["lift"], timeout=120, check=False)
    drop_in = record.get("drop_in")
    if drop_in and Path(drop_in).exists():
        Path(drop_in).unlink()
        with contextlib.suppress(OSError):
            Path(drop_in).parent.rmdir()
        subprocess.run(["systemctl", "daemon-reload"], timeout=120, check=False)


def ask_child(action: str, pids: list[int], pairs: dict[str, str], seconds: float) -> list[Said]:
    """The action in a child with a deadline; who hangs in the driver does not answer, and is left to it."""
    import tempfile

    with tempfile.TemporaryFile() as out:
        argv = [sys.executable, __file__, action, json.dumps({"pairs": pairs}), *map(str, pids)]
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, start_new_session=True)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
        out.seek(0)
        lines = out.read().decode("utf-8", "replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def thaw(path: Path, patience: float = 600.0, limit: float = 1200.0) -> str:
    """What the dead-man timer does: let work that still stands go on; says what it did. A process for which the driver
    has no answer within ``limit`` seconds keeps no other from going on.

    Who holds the record for longer than ``patience`` seconds hangs, perhaps for ever, in a store that does not answer.
    The work goes on all the same: whoever wakes up then finds by the record that its save is out of date. But not if it
    is being ended: that is taken back only while nobody is at it, and nothing of the work was ended yet.

    A step that fails or hangs does not keep the next from being taken.
    """
    with contextlib.ExitStack() as stack:
        alone = False
        with contextlib.suppress(TimeoutError):
            stack.enter_context(held(path, patience))
            alone = True
        record = read_record(path)
        state = record.get("state")
        half_ended = state == COMMITTING and alone and stands(record)
        if state not in (FROZEN, PUBLISHED) and not half_ended and not (state == THAWED and record.get("wake")):
            return f"nothing to do: {path} is {record.get('state', 'gone')}"
        wrong: list[str] = []
        states: dict[int, str] = {}

        def ask(action: str, pids: list[int], pairs: dict[str, str]) -> list[Said]:
            return ask_child(action, pids, pairs, limit)

        def go_on() -> None:
            states.update(run_again(record, ask))

        def note() -> None:
            record.update(state=THAWED, thawed_at=time.time(), thawed_states={str(k): v for k, v in states.items()})
            write_record(path, record)

        def forget_plain() -> None:
            import shutil

            if record.get("plain"):
                shutil.rmtree(record["plain"], ignore_errors=True)

        def wake_up() -> None:
            if record.get("wake"):
                asleep = wake(record)
                wrong.extend([asleep] if asleep else [])
                write_record(path, record)

        for act in (go_on, note, lambda: tidy(record), forget_plain, wake_up):
            try:
                act()
            except Exception as exc:
                wrong.append(f"{type(exc).__name__}: {exc}")
        still = {pid: state for pid, state in states.items() if state != RUNNING}
        wrong += [str(still)] if still else []
        return f"let {record['workload']} go on" + (f", but {'; '.join(wrong)}" if wrong else "")


def main(argv: list[str]) -> int:
    if argv[:1] == ["thaw"]:
        print(thaw(Path(argv[1])), flush=True)
        return 0
    action, options = argv[0], json.loads(argv[1])
    pids = [int(word) for word in argv[2:] if re.fullmatch(r"\d+", word)]

    def say(said: Said) -> None:
        print(json.dumps(said), flush=True)

    act_on_all(action, pids, float(options.get("timeout", 10)), dict(options.get("pairs", {})), say)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
