# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU of a snapshot of 1,000 Kubernetes nodes and 4,000 pods, over listing them with kubernetes.core.k8s_info."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import kube_fleet
from k8s_snapshot_vs_floor import FLOOR, LISTS

AIM = 0.05
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gpufleet/kubernetes.core"
PART = "ansible_collections/kubernetes/core/"


def peer() -> Path | None:
    """Where kubernetes.core is: in the cache, or taken out of the package ``ansible``; None if that cannot be had."""
    if not (CACHE / PART).is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*get, "--dest", str(CACHE), "ansible"], timeout=600, check=False, stdout=2)
        if done.returncode:
            return None
        (wheel,) = CACHE.glob("ansible-*.whl")
        with zipfile.ZipFile(wheel) as content:
            content.extractall(CACHE, [name for name in content.namelist() if name.startswith(PART)])
        wheel.unlink()
    return CACHE


def main() -> None:
    there = peer()
    if there is None:
        why = "kubernetes.core cannot be had: the package ansible could not be downloaded with pip; needs a network"
        print(json.dumps({"bench": "k8s_snapshot_vs_k8s_info", "skipped": why}))
        return
    kubeconfig = str(kube_fleet.start("large", 1000, 4000))
    file = there / PART / "plugins/modules/k8s_info.py"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(there), os.environ.get("PYTHONPATH", "")])
    spent = [
        kube_fleet.module_file(file, kind=kind, api_version="v1", kubeconfig=kubeconfig) for kind in ("Pod", "Node")
    ]
    found = sum(len(json.loads(each.said)["resources"]) for each in spent)
    if found < 5000:
        raise SystemExit(f"k8s_info listed {found} objects, expected 5000")
    cpu = sum(each.cpu for each in spent)
    options = {"kubeconfig": kubeconfig}
    ours = kube_fleet.module("fleet_snapshot_info", scheduler="kubernetes", scheduler_options=options)
    floor = kube_fleet.process([sys.executable, "-c", FLOOR, kubeconfig, *LISTS])
    result = {
        "bench": "k8s_snapshot_vs_k8s_info",
        "ratio": round(ours.cpu / cpu, 3),
        "ours": round(ours.cpu, 2),
        "peer": round(cpu, 2),
        "unit": "s CPU",
        "aim": AIM,
        "peer_is": "kubernetes.core.k8s_info for pods and for nodes, a module run each, judging nothing",
        "ratio_of_fetching_and_json_loads_alone": round(floor.cpu / cpu, 3),
        "wall": round(ours.wall, 2),
        "peer_wall": round(sum(each.wall for each in spent), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
