# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container of podman that is stopped, saved, ended, and brought back under its own name.

Podman either ends a container with its save or lets it go on; what is asked for here is a container that stands still.
So its processes are stopped by SIGSTOP first: CRIU saves them as stopped, podman leaves them so, and they come back
so. PIDs are its own (podman gives each container a PID namespace), hence never taken at the target.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.carried import below
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Service, ServiceError
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed, Runner

PREFIX = "podman:"
ARCHIVE = "images/container.tar"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_QUERY = 60.0
_CRIU_LOG = re.compile(r'log file: ([^\s"]+)')
_STARTS_AGAIN = ("always", "unless-stopped")


class Podman(Service):
    """One container, in the part of a service. Its ``unit`` is ``podman:NAME``."""

    def __init__(self, run: Runner, unit: str, **options: Any) -> None:
        super().__init__(run, unit, **options)
        self.container = unit[len(PREFIX) :]
        if not _NAME.fullmatch(self.container):
            raise ServiceError(f"{self.container!r} is not the name of a container")
        self.moved: Renamed = Renamed(self)  # type: ignore[assignment]

    @property
    def guard_path(self) -> Path:
        return Path("/run/gpufleet/no-drop-in")

    @property
    def status_command(self) -> str:
        return f"podman container inspect {self.container}"

    @property
    def members_command(self) -> str:
        return f"podman top {self.container}"

    @property
    def log_command(self) -> str:
        return f"podman logs {self.container}"

    def criu_log(self, done: Completed) -> Path | None:
        """The log that runc names when CRIU has failed."""
        found = _CRIU_LOG.search(done.stderr)
        return Path(found[1]) if found else None

    def podman(self, *words: str, timeout: float = _QUERY) -> Completed:
        return self._run(["podman", *words], timeout=timeout)

    def inspect(self, name: str = "") -> dict[str, Any] | None:
        """What podman knows of the container; None if it knows none; :raises ServiceError: if it does not answer."""
        done = self.podman("container", "inspect", name or self.container)
        if not done.ok:
            if "no such container" in done.stderr.lower():
                return None
            raise ServiceError(f"podman does not answer ({done.describe()}); look at: podman ps --all")
        try:
            (found,) = json.loads(done.stdout)
        except ValueError as exc:
            raise ServiceError(f"podman container inspect {self.container} printed something else: {exc}") from exc
        return dict(found)

    def show(self) -> Mapping[str, str]:
        """The properties of a unit, as far as a container has them."""
        found = self.inspect()
        if found is None:
            return {"LoadState": "not-found", "ActiveState": "inactive"}
        state = found.get("State") or {}
        path = str(state.get("CgroupPath") or "")
        return {
            "LoadState": "loaded",
            "ActiveState": "active" if state.get("Running") else "inactive",
            "MainPID": str(state.get("Pid") or 0),
            "ControlGroup": path,
        }

    def refusals(self) -> list[tuple[str, str, str]]:
        """What keeps it from being moved: feature, what was seen, and the command that looks further."""
        found = self.inspect() or {}
        host, config = found.get("HostConfig") or {}, found.get("Config") or {}
        wrong = []
        unit = (config.get("Labels") or {}).get("PODMAN_SYSTEMD_UNIT")
        look = f"podman container inspect {self.container}"
        if unit:
            wrong.append(("container_of_unit", f"{unit} runs it, and would start it again", f"systemctl cat {unit}"))
        if host.get("AutoRemove"):
            wrong.append(("auto_remove", "it was started with --rm, so ending it forgets it", look))
        if host.get("PidMode") not in (None, "", "private"):
            wrong.append(("pid_namespace", f"it shares the PIDs of {host['PidMode']}", look))
        if found.get("Pod"):
            wrong.append(("pod", f"it is part of pod {found['Pod'][:12]}", f"podman pod inspect {found['Pod'][:12]}"))
        runtime = str(found.get("OCIRuntime") or "")
        if not self._saves(runtime):
            wrong.append(("oci_runtime", f"it is run by {runtime}, which cannot save it here", f"{runtime} --version"))
        policy = (host.get("RestartPolicy") or {}).get("Name")
        if policy in _STARTS_AGAIN and self.podman_starts_at_boot():
            seen = (
                f"its restart policy is {policy}, so podman-restart.service would start it here beside its other self"
            )
            wrong.append(("restart_policy", seen, "systemctl status podman-restart.service"))
        return wrong

    def _saves(self, runtime: str) -> bool:
        """Whether an OCI runtime can save containers; of crun that depends on how it was built (podman asks so too)."""
        return self._run([runtime, "checkpoint", "--help"], timeout=_QUERY).ok

    def podman_starts_at_boot(self) -> bool:
        return self._run(["systemctl", "is-enabled", "podman-restart.service"], timeout=_QUERY).ok

    def image(self) -> dict[str, Any]:
        """What of it must be on the target, which does not come with the save."""
        found = self.inspect() or {}
        mounts = found.get("Mounts") or ()
        return {
            "image": str(found.get("Image") or ""),
            "image_name": str(found.get("ImageName") or ""),
            "mounts": sorted(str(one["Source"]) for one in mounts if one.get("Type") == "bind" and one.get("Source")),
            "volumes": sorted(str(one["Name"]) for one in mounts if one.get("Type") == "volume" and one.get("Name")),
            "networks": sorted((found.get("NetworkSettings") or {}).get("Networks") or ()),
            "runtime": str(found.get("OCIRuntime") or ""),
        }

    def lacks(self, wanted: Mapping[str, Any], paths: Sequence[str]) -> str:
        """What of :meth:`image` is not on this node and does not come with the save (``paths``); empty if all is."""
        if not self.podman("image", "exists", str(wanted["image"])).ok:
            return f"image {wanted['image_name']} ({str(wanted['image'])[:12]}) is not here"
        if not self._saves(str(wanted["runtime"])):
            return f"{wanted['runtime']}, which ran it, is not here or cannot restore it"
        for kind in ("volume", "network"):  # podman would make a volume that is not here, and an empty one
            for name in wanted[f"{kind}s"]:
                if not self.podman(kind, "exists", name).ok:
                    return f"there is no {kind} {name} here"
        missing = [path for path in wanted["mounts"] if not (os.path.lexists(path) or below(path, paths))]
        return f"{missing[0]}, which it mounts, is not here" if missing else ""

    def fragment(self) -> str:
        return ""

    def guard(self) -> None: ...

    def unguard(self) -> None: ...

    def reload(self) -> None: ...

    # -- the save

    def dump(self, members: Sequence[Mapping[str, Any]], images: Path, timeout: float) -> Completed:
        """Stop its processes (``pid``, ``start``), and have podman save them as they stand. Who took the PID of one
        that ended meanwhile goes on."""
        for pid in suspend.same(members):
            os.kill(pid, signal.SIGSTOP)
        archive = images.parent / ARCHIVE
        return self.podman(
            "container", "checkpoint", "--leave-running", "--export", str(archive), "--compress", "none",
            "--ignore-volumes", "--file-locks", self.container,
            timeout=timeout,
        )  # fmt: skip

    # -- the end

    def end(self, alive: Callable[[], Sequence[int]], timeout: float) -> None:
        """End it by SIGKILL, as its owner's wish, so that no policy starts it again."""
        name = self.container if self.inspect() is not None else self.moved.aside
        done = self.podman("stop", "--time", "0", name, timeout=timeout)
        deadline = self._monotonic() + timeout
        while alive() and self._monotonic() < deadline:
            self._sleep(0.1)
        left = alive()
        if left:
            raise ServiceError(f"PIDs {', '.join(map(str, left))} of {self.unit} are still there ({done.describe()})")

    def reset(self) -> None: ...

    def stop(self, timeout: float) -> Completed:
        return self.podman("stop", self.container, timeout=timeout)

    def start(self, timeout: float) -> bool:
        done = self.podman("start", self.container, timeout=timeout)
        self._sleep(1.0)  # podman answers before a command that fails at once has failed
        return done.ok and self.show().get("ActiveState") == "active"

    def last_words(self) -> str:
        done = self.podman("logs", "--tail", "1", self.container)
        return (done.stdout or done.stderr).strip()

    # -- the return

    def adopt(self, fragment: str) -> None: ...

    def restore(self, images: Path, timeout: float) -> Completed:
        """Make the container anew from its archive, under its own name and id; its processes stand still.

        Under another id they would be in the control group of the old one, and nobody would know whose they are.
        """
        return self.podman(
            "container", "restore", "--import", str(images.parent / ARCHIVE), "--ignore-volumes", "--file-locks",
            timeout=timeout,
        )  # fmt: skip

    def settle(self) -> None: ...

    def forget(self) -> None:
        """Remove a container that was made here by :meth:`restore`."""
        self.podman("rm", "--force", "--time", "0", self.container)


class Renamed:
    """Keeps a container that now runs on another node from being started on this one: under another name."""

    def __init__(self, box: Podman) -> None:
        self._box = box

    @property
    def aside(self) -> str:
        return f"{self._box.container}-moved-by-gpufleet"

    def place(self, dummy: Sequence[str]) -> None:
        if self._box.inspect() is None and self._box.inspect(self.aside) is not None:
            return
        done = self._box.podman("rename", self._box.container, self.aside)
        if not done.ok:
            raise ServiceError(f"the container could not be put aside ({done.describe()})")

    def lifting(self, dummy: str) -> list[str]:
        return ["podman", "rename", self.aside, self._box.container]

    def lift_one(self, dummy: str) -> bool:
        if self._box.inspect(self.aside) is None:
            return False
        done = self._box.podman("rename", self.aside, self._box.container)
        if not done.ok:
            raise ServiceError(f"{self.aside} could not be given its name again ({done.describe()})")
        return True
