# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every node's kubelet in one process: heartbeats, and pods that start, run, end and stop as their annotations say.

It does what a kubelet does towards the API server and nothing else: no container runs. What a pod may say
(``lab.gpufleet/…``, times in seconds):

    starts-after: "3"    how long it stays Pending (default 0)
    start: never         it stays Pending for ever; "crash" has its container restart for ever
    runs-for: "20"       it ends by itself, as Succeeded, or as Failed with exits: "1"
    stops-after: "5"     how long its processes take to stop (default 0.1, and never more than its grace period)
    stuck: "true"        it never stops: Terminating for ever

An image with ``.404.`` in its name cannot be pulled; one called ``lab.gpufleet/ends`` ends by itself, as Succeeded.

Nodes are those labelled ``lab.gpufleet/node=true``. With the state directory of a hosts lab, pods on nodes that are its
machines are real processes there (machines.py).
"""

from __future__ import annotations

import contextlib
import heapq
import http.client
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from api import MERGE, STRATEGIC, Api, ApiError
from machines import Machines

PREFIX = "lab.gpufleet/"
NODE_LABEL = PREFIX + "node"
WORKERS = 4

Object = dict[str, Any]


def is_missing(image: str) -> bool:
    return ".404." in image


def now(micro: bool = False) -> str:
    moment = datetime.now(timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


class Agenda:
    """Things to do at a time, done by a few threads."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()

    def add(self, delay: float, act: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay, next(self._number), act))
            self._changed.notify()

    def work(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                dummy, dummy, act = heapq.heappop(self._due)
            try:
                act()
            except (OSError, http.client.HTTPException):  # the server is away: as a kubelet would, later again
                self.add(1.0, act)
            except ApiError as exc:
                if exc.status >= 500 or exc.status == 429:
                    self.add(1.0, act)
                elif exc.status not in (404, 409):
                    print(exc, flush=True)
            except Exception:  # one pod's trouble is not the others'
                traceback.print_exc()


class Kubelets:
    def __init__(self, api: Api, heartbeat: float, machines: Machines | None = None) -> None:
        self.api = api
        self.machines = machines
        self.heartbeat = heartbeat
        self.agenda = Agenda()
        self.nodes: set[str] = set()
        self._doing: dict[str, str] = {}  # pod uid → what was last begun with it

    def run(self) -> None:
        for dummy in range(WORKERS):
            threading.Thread(target=self.agenda.work, daemon=True).start()
        threading.Thread(target=self._follow, args=("/api/v1/nodes", self.node_seen), daemon=True).start()
        self._follow("/api/v1/pods", self.pod_seen)

    def _follow(self, path: str, seen: Callable[[str, Object], None]) -> None:
        """Tell ``seen`` of every object under ``path`` and of every change, for ever."""
        while True:
            with contextlib.suppress(ApiError, OSError, http.client.HTTPException, ValueError):
                found = self.api.get(path)
                for item in found["items"]:
                    seen("ADDED", item)
                version = found["metadata"]["resourceVersion"]
                for event in self.api.watch(path, version):
                    if event["type"] == "ERROR":
                        break
                    if event["type"] != "BOOKMARK":
                        seen(event["type"], event["object"])
            time.sleep(0.2)

    def node_seen(self, event: str, node: Object) -> None:
        name = node["metadata"]["name"]
        if event == "DELETED":
            self.nodes.discard(name)
        elif name not in self.nodes and node["metadata"].get("labels", {}).get(NODE_LABEL) == "true":
            self.nodes.add(name)
            self.agenda.add(0, lambda: self._beat(name))
            for pod in self.api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={name}")["items"]:
                self.pod_seen("ADDED", pod)

    def _beat(self, name: str) -> None:
        if name not in self.nodes:
            return
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": name, "leaseDurationSeconds": int(self.heartbeat * 4), "renewTime": now(micro=True)}
        try:
            self.api.ask("PATCH", f"{path}/{name}", {"spec": spec}, MERGE)
        except ApiError as exc:
            if exc.status != 404:
                raise
            self.api.post(path, {"metadata": {"name": name}, "spec": spec})
        self.agenda.add(self.heartbeat, lambda: self._beat(name))

    def pod_seen(self, event: str, pod: Object) -> None:
        meta = pod["metadata"]
        uid = meta["uid"]
        if event == "DELETED":
            self._doing.pop(uid, None)
            return
        if pod["spec"].get("nodeName") not in self.nodes:
            return
        phase = pod.get("status", {}).get("phase", "Pending")
        wish = "stop" if meta.get("deletionTimestamp") else "start" if phase == "Pending" else phase
        if self._doing.get(uid) == wish:
            return
        said = {k[len(PREFIX) :]: v for k, v in meta.get("annotations", {}).items() if k.startswith(PREFIX)}
        if pod["spec"]["containers"][0]["image"].startswith(PREFIX + "ends"):
            said.setdefault("runs-for", "0.2")
        if wish == "stop" and said.get("stuck") != "true":
            grace = float(meta.get("deletionGracePeriodSeconds") or 0)
            self.agenda.add(min(float(said.get("stops-after", 0.1)), grace), lambda: self.stop(pod))
        elif wish == "start" and said.get("start") != "never":
            self.agenda.add(float(said.get("starts-after", 0)), lambda: self.start(pod, said))
        elif wish == "Running" and "runs-for" in said:
            self.agenda.add(float(said["runs-for"]), lambda: self.end(pod, int(said.get("exits", "0"))))
        self._doing[uid] = wish

    def start(self, pod: Object, said: dict[str, str]) -> None:
        missing = [container for container in pod["spec"]["containers"] if is_missing(container["image"])]
        if missing:
            waiting = {"waiting": {"reason": "ImagePullBackOff"}}
            named = {"name": missing[0]["name"], "image": missing[0]["image"], "imageID": ""}
            status = {**named, "ready": False, "restartCount": 0, "state": waiting}
            self._report(pod, {"phase": "Pending", "containerStatuses": [status]})
            return
        machines, ends = self._machines(pod), pod["spec"].get("restartPolicy") == "Never"
        if machines and not ends:
            machines.start(pod)
        self._report_running(pod, said)
        if machines and ends:
            self.end(pod, *machines.run(pod))

    def _machines(self, pod: Object) -> Machines | None:
        there = self.machines is not None and pod["spec"]["nodeName"] in self.machines.names
        return self.machines if there else None

    def _report_running(self, pod: Object, said: dict[str, str]) -> None:
        moment = now()
        crash = said.get("start") == "crash"
        spec = pod["spec"]
        containers = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": container["image"],
                "restartCount": 12 if crash else 0,
                "ready": not crash,
                "started": not crash,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}} if crash else {"running": {"startedAt": moment}},
            }
            for container in spec["containers"]
        ]
        conditions = {"Initialized": True, "ContainersReady": not crash, "Ready": not crash}
        self._report(
            pod,
            {
                "phase": "Running",
                "startTime": moment,
                "hostIP": "10.0.0.1",
                "podIP": "10.1.0.1",
                "podIPs": [{"ip": "10.1.0.1"}],
                "containerStatuses": containers,
                "conditions": [
                    {"type": kind, "status": str(value), "lastTransitionTime": moment}
                    for kind, value in conditions.items()
                ],
            },
        )

    def end(self, pod: Object, status: int, words: str = "") -> None:
        moment = now()
        over = {
            "exitCode": status,
            "reason": "Error" if status else "Completed",
            "finishedAt": moment,
            "message": words,
        }
        containers = [
            {"name": c["name"], "image": c["image"], "imageID": c["image"], "restartCount": 0, "ready": False}
            | {"state": {"terminated": over}}
            for c in pod["spec"]["containers"]
        ]
        unready = [
            {"type": kind, "status": "False", "reason": "PodCompleted", "lastTransitionTime": moment}
            for kind in ("Ready", "ContainersReady")
        ]
        phase = "Failed" if status else "Succeeded"
        self._report(pod, {"phase": phase, "containerStatuses": containers, "conditions": unready})

    def stop(self, pod: Object) -> None:
        """The processes are gone: so is the pod, unless a finalizer keeps it."""
        machines = self._machines(pod)
        if machines:
            machines.stop(pod)
        meta = pod["metadata"]
        self.api.ask(
            "DELETE",
            f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}",
            {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}},
        )

    def _report(self, pod: Object, status: Object) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
        self.api.ask("PATCH", path, {"metadata": {"uid": meta["uid"]}, "status": status}, STRATEGIC)


if __name__ == "__main__":
    kubeconfig, user, heartbeat, hosts = sys.argv[1:]
    machines = Machines(Path(hosts)) if hosts else None
    Kubelets(Api.of(Path(kubeconfig), user or None), float(heartbeat), machines).run()
