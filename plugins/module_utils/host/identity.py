# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who a process is: its systemd unit, container, pod, Slurm job, session and user, from /proc/PID and nothing else.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import pwd
import re
from dataclasses import dataclass, replace

from ansible_collections.gpufleet.driver.plugins.module_utils.host import processes

_ID = r"(?P<id>[0-9a-f]{64})"
_SCOPE = re.compile(rf"^(?P<prefix>[a-z-]+?)-(?:payload-|conmon-)?{_ID}(?:\.scope)?$")
_COLON = re.compile(rf"^.*:(?P<prefix>[a-z-]+):{_ID}$")
_BARE = re.compile(rf"^{_ID}$")
_RUNTIMES = {
    "docker": "docker",
    "libpod": "podman",
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "cri-o",
}
_POD = re.compile(r"(?:^|-)pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|:|$)")
_QOS = re.compile(r"kubepods?[-/]?.*?(?P<qos>burstable|besteffort)")
_SLURM = re.compile(
    r"/(?:slurm(?:_[^/]+)?/uid_\d+|(?:[^/]+_)?slurmstepd\.scope)/job_(?P<job>\d+)(?:/step_(?P<step>[^/]+))?"
)
_SESSION = re.compile(r"/user-(?P<uid>\d+)\.slice/session-(?P<session>[^/]+)\.scope")
_USER_MANAGER = re.compile(r"(?P<above>.*?)/user@(?P<uid>\d+)\.service/(?P<rest>.*)")
_UNIT = re.compile(r"^[^/]+\.(?:service|scope|socket)$")
_NO_LOGIN = 4294967295  # (uid_t) -1: never logged in


@dataclass(frozen=True)
class Owner:
    """Where the kernel's control groups place a process; None wherever it is not in such a thing."""

    unit: str | None = None
    user_unit_of: int | None = None
    """The user whose own service manager runs ``unit`` or ``container``; None if it is the system's."""
    container: str | None = None
    runtime: str | None = None
    """docker, podman, containerd, cri-o, or None where the path does not tell."""
    pod: str | None = None
    qos: str | None = None
    job: str | None = None
    step: str | None = None
    session: str | None = None


def parse_cgroup(text: str) -> Owner:
    """Place a process by its /proc/PID/cgroup: version 1 (a row per controller), 2 (one row) or both, with either of
    the drivers (systemd, cgroupfs) that container runtimes have."""
    owner = Owner()
    for line in text.splitlines():
        path = line.split(":", 2)[-1].replace(" (deleted)", "")
        found = _of_path(path)
        owner = replace(owner, **{k: v for k, v in vars(found).items() if v is not None and getattr(owner, k) is None})
    return owner


def _of_path(path: str) -> Owner:
    manager = _USER_MANAGER.match(path)
    if manager and _container(_parts(manager["above"])) == (None, None):
        # users name what is below their own managers as they like, also as a pod or a job
        parts = _parts(manager["rest"])
        unit, (container, runtime) = _unit(parts), _container(parts)
        uid = int(manager["uid"]) if unit or container else None
        return Owner(unit=unit, user_unit_of=uid, container=container, runtime=runtime)
    parts = _parts(manager["above"] if manager else path)
    container, runtime = _container(parts)
    pod = next((match["uid"].replace("_", "-") for match in map(_POD.search, parts) if match), None)
    qos = _QOS.search(path)
    slurm = _SLURM.search(path)
    session = _SESSION.search(path)
    return Owner(
        unit=None if pod or slurm else _unit(parts),
        container=container,
        runtime=runtime,
        pod=pod,
        qos=(qos["qos"] if qos else "guaranteed") if pod else None,
        job=slurm["job"] if slurm else None,
        step=slurm["step"] if slurm else None,
        session=session["session"] if session else None,
    )


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _container(parts: list[str]) -> tuple[str | None, str | None]:
    for part, parent in zip(reversed(parts), [*reversed(parts[:-1]), ""]):
        named = _SCOPE.match(part) or _COLON.match(part)
        if named:
            return named["id"], _RUNTIMES.get(named["prefix"])
        bare = _BARE.match(part)
        if bare:
            return bare["id"], _RUNTIMES.get(parent)
    return None, None


def _unit(parts: list[str]) -> str | None:
    """The first unit below the slices; what lies below it is the unit's own business (delegation)."""
    for part in parts:
        if _UNIT.match(part):
            return None if _SCOPE.match(part) or part.startswith(("session-", "init.scope")) else part
    return None


@dataclass(frozen=True)
class Identity:
    """One process by every name it has. ``pids`` are its ids from the outermost PID namespace we see to its own."""

    pid: int
    pids: tuple[int, ...]
    ppid: int
    group: int
    session: int
    """Process group and session, which a child keeps when its parent dies."""
    comm: str
    """As the kernel keeps it: at most 15 characters."""
    command: str
    state: str
    user: str
    login: str | None
    """Who logged in and started it, across su and sudo; None for daemons."""
    owner: Owner


def identify(pid: int, proc: str = "/proc") -> Identity:
    """:raises OSError: if the process has gone, or may not be looked at."""
    base = f"{proc}/{pid}"
    about = processes.parse_stat(processes.read(f"{base}/stat"))
    status = parse_status(processes.read(f"{base}/status").decode("utf-8", "replace"))
    uid = int(status.get("Uid", "0").split()[0])
    return Identity(
        pid=pid,
        pids=tuple(int(word) for word in status.get("NSpid", str(pid)).split()),
        ppid=about.ppid,
        group=about.group,
        session=about.session,
        comm=about.comm,
        command=_command(base, about),
        state=about.state,
        user=user_name(uid),
        login=_login(base),
        owner=parse_cgroup(_text(f"{base}/cgroup")),
    )


def _command(base: str, about: processes.Stat) -> str:
    """The command line, but not of a process in uninterruptible sleep: reading it could hang with it."""
    if about.state == "D":
        return about.comm
    line = _text(f"{base}/cmdline").rstrip("\0").replace("\0", " ")
    return line[:4096] or about.comm


def _login(base: str) -> str | None:
    text = _text(f"{base}/loginuid").strip()
    return user_name(int(text)) if text.isdigit() and int(text) != _NO_LOGIN else None


def _text(path: str) -> str:
    try:
        return processes.read(path).decode("utf-8", "replace")
    except OSError:
        return ""


def parse_status(text: str) -> dict[str, str]:
    """The rows of a /proc/PID/status by their names."""
    return {key: value.strip() for key, dummy, value in (line.partition(":") for line in text.splitlines())}


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def parse_container_names(text: str) -> dict[str, str]:
    """``docker|podman ps --no-trunc --format '{{.ID}} {{.Names}}'`` → names by full id."""
    rows = (line.split(None, 1) for line in text.splitlines())
    return {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) == 2}
