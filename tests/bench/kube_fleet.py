# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Kubernetes cluster for benchmarks: the lab's real control plane, with nodes and pods in numbers."""

from __future__ import annotations

import atexit
import concurrent.futures
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
LAB = TOP / "tests/lab/kubernetes"
sys.path.insert(0, str(LAB))

from api import Api  # noqa: E402

NAMESPACES = 20


def start(name: str, nodes: int, pods: int) -> Path:
    """The kubeconfig of a cluster with nodes and running pods, which benchmarks of one run share."""
    shared = os.environ.get("GPUFLEET_BENCH_LABS")
    state = Path(shared or tempfile.mkdtemp()) / f"kubernetes-{name}"
    kubeconfig = state / "kubeconfig"
    if (state / "filled").exists():
        return kubeconfig
    program = str(LAB / "lab")
    if not shared:
        atexit.register(lambda: subprocess.run([program, "down", "--state", str(state)], check=True, timeout=100))
    subprocess.run([program, "up", "--nodes", str(nodes), "--state", str(state)], check=True, timeout=4000, stdout=2)
    fill(Api.of(kubeconfig), nodes, pods)
    (state / "filled").touch()
    return kubeconfig


def fill(api: Api, nodes: int, pods: int) -> None:
    """Two-GPU pods, four on each node, with what a serving pod usually carries.

    What owns them has to exist, or they are collected as garbage; it must not count its pods: a ConfigMap.
    """
    owners = {}
    for number in range(NAMESPACES):
        path = f"/api/v1/namespaces/team-{number}"
        if api.find(path) is None:
            api.post("/api/v1/namespaces", {"metadata": {"name": f"team-{number}"}})
            api.post(f"{path}/configmaps", {"metadata": {"name": "server"}})
        owners[number] = api.get(f"{path}/configmaps/server")["metadata"]["uid"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: _pod(api, number, nodes, owners[number % NAMESPACES]), range(pods)))
    end = time.monotonic() + 600
    while api.get("/api/v1/pods", fieldSelector="status.phase!=Running", limit=1)["items"]:
        if time.monotonic() > end:
            raise SystemExit("the pods do not run after 600 s")
        time.sleep(1)


def refill(api: Api, nodes: int, pods: int) -> list[dict[str, Any]]:
    """New pods once the earlier ones are gone."""
    while api.get("/api/v1/pods")["items"]:
        time.sleep(0.2)
    fill(api, nodes, pods)
    return api.get("/api/v1/pods")["items"]


def _pod(api: Api, number: int, nodes: int, uid: str) -> None:
    app = f"server-{number // 40}"
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "server", "uid": uid, "controller": True}
    container = {
        "name": "server",
        "image": "vllm/vllm-openai:v0.9.1",
        "args": ["--model", f"org/model-{number // 40}", "--tensor-parallel-size", "2", "--port", "8000"],
        "env": [{"name": f"SETTING_{index}", "value": f"value-{index}"} for index in range(12)],
        "ports": [{"containerPort": 8000, "name": "http"}],
        "resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "16", "memory": "200Gi"}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    meta = {
        "name": f"{app}-{number}",
        "labels": {"app.kubernetes.io/name": app, "app.kubernetes.io/part-of": "serving", "team": f"{number % 20}"},
        "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "8000"},
        "ownerReferences": [owner],
    }
    spec = {
        "nodeName": f"gpu-{number % nodes + 1}",
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "terminationGracePeriodSeconds": 1,
    }
    api.post(f"/api/v1/namespaces/team-{number % NAMESPACES}/pods", {"metadata": meta, "spec": spec})


def emptied(api: Api, kubeconfig: Path, nodes: int, pods: int) -> float:
    """Wall seconds in which the module node_evacuate empties all nodes of new pods."""
    made = refill(api, nodes, pods)
    names = [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in made]
    spent = module(
        "node_evacuate",
        scheduler="kubernetes",
        scheduler_options={"kubeconfig": str(kubeconfig)},
        nodes=[f"gpu-{number}" for number in range(1, nodes + 1)],
        run_id="bench",
        fates=[{"workload": name, "fate": "cold_start"} for name in names],
        deadline=time.time() + 600,
        patience=60,
    )
    said = json.loads(spent.said)
    if said["waiting_nodes"] or said["failed_nodes"]:
        raise SystemExit(f"not all nodes are empty: {said}")
    return spent.wall


RUN_MODULE = """
import runpy, sys
from ansible.module_utils import basic
basic._ANSIBLE_PROFILE, basic._ANSIBLE_ARGS = "legacy", sys.argv[2].encode()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclass(frozen=True)
class Spent:
    """What a process took, in seconds, and its standard output."""

    cpu: float
    wall: float
    said: str


def module(name: str, **arguments: Any) -> Spent:
    """Run a module of ours as a process of its own."""
    return module_file(TOP / f".build/ansible_collections/gpufleet/driver/plugins/modules/{name}.py", **arguments)


def module_file(file: Path, **arguments: Any) -> Spent:
    given = json.dumps({"ANSIBLE_MODULE_ARGS": arguments})
    return process([sys.executable, "-c", RUN_MODULE, str(file), given])


def process(argv: list[str]) -> Spent:
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall, done.stdout)
