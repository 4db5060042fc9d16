# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods as real processes on the machines of the hosts lab: they hold the device files of the GPUs they asked for.

Each is a transient unit in the slice a kubelet would put it in. One annotated ``lab.gpufleet/opens: "3"`` holds
/dev/nvidia3 without having asked for it. A pod that is to end (restart policy Never) runs its
command there, in the machine's own root, and ends as it ends; any other just stays and holds its devices.
"""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().parents[1] / "hosts/lab"
SECONDS = 120

Object = dict[str, Any]


class Machines:
    """The machines of the hosts lab in ``state``; a node of the cluster is the machine of its name, if there is one."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.names = {node["name"] for node in json.loads((state / "lab.json").read_text())["nodes"]}
        self._lock = threading.Lock()
        self._held: dict[str, tuple[str, list[int]]] = {}  # pod uid → machine and the numbers of its GPUs

    def start(self, pod: Object) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        gpus = list(self._take(uid, node, gpus_of(pod)))
        stolen = pod["metadata"].get("annotations", {}).get("lab.gpufleet/opens")
        if stolen is not None:
            gpus.append(int(stolen))
        redirections = " ".join(f"{number + 3}<>/dev/nvidia{gpu}" for number, gpu in enumerate(gpus))
        holds = f"exec {redirections}; " if redirections else ""
        self._exec(node, *self._unit(uid), "bash", "-c", f"{holds}exec sleep infinity")

    def run(self, pod: Object) -> tuple[int, str]:
        """Exit status and last words of the command of a pod that is to end."""
        command = pod["spec"]["containers"][0]["command"]
        done = self._call(pod["spec"]["nodeName"], *self._unit(pod["metadata"]["uid"]), "--wait", "--pipe", *command)
        return done.returncode, (done.stdout + done.stderr)[-2000:]

    def stop(self, pod: Object) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        self._exec(node, "bash", "-c", f"systemctl stop {self._name(uid)} 2>/dev/null || true")
        with self._lock:
            self._held.pop(uid, None)

    def _take(self, uid: str, node: str, count: int) -> list[int]:
        with self._lock:
            if uid not in self._held:
                taken = {gpu for machine, gpus in self._held.values() if machine == node for gpu in gpus}
                free = [gpu for gpu in range(16) if gpu not in taken]
                self._held[uid] = (node, free[:count])
            return self._held[uid][1]

    def _name(self, uid: str) -> str:
        return f"cri-containerd-{uid.replace('-', '')}.service"

    def _unit(self, uid: str) -> list[str]:
        slice_ = f"kubepods-pod{uid.replace('-', '_')}.slice"
        return ["systemd-run", "--quiet", "--collect", f"--unit={self._name(uid)}", f"--slice={slice_}"]

    def _exec(self, node: str, *argv: str) -> None:
        done = self._call(node, *argv)
        if done.returncode:
            raise OSError(f"{node}: {' '.join(argv)}: {done.stderr.strip()}")

    def _call(self, node: str, *argv: str) -> subprocess.CompletedProcess[str]:
        command = [str(PROGRAM), "exec", "--state", str(self.state), node, "--", *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def gpus_of(pod: Object) -> int:
    asked = [container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]]
    return sum(int(limits.get("nvidia.com/gpu", 0)) for limits in asked)
