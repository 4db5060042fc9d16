# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU of a snapshot of a real slurmctld with 5,000 nodes, over that of the bare commands, both with slurmctld's part.

The bare commands only copy text; ours makes nodes, jobs and the planner's snapshot of it. ``floor`` is what is left if
reading all that text cost nothing: the bare commands, the question whether slurmctld is there, the reservations, and
one object of the planner for each node. The last figures leave out slurmctld.

Nodes are records without a slurmd; arrays of jobs wait in the queue."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from pathlib import Path
from typing import Callable

import slurm_lab

from ansible_collections.gpufleet.driver.plugins.module_utils import execution, fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm import Slurm
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_commands import Commands

NODES, JOBS, AIM = 5000, 5000, 1.5


def clients() -> float:
    """CPU seconds of this process and its children so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def controller(conf: str) -> float:
    """CPU seconds of the lab's slurmctld so far."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "comm").read_text() == "slurmctld\n" and conf.encode() in (path / "environ").read_bytes():
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    raise SystemExit(f"no slurmctld runs with {conf}")


def cpu(conf: str, act: Callable[[], object], times: int = 5) -> tuple[float, float]:
    """The mean CPU seconds of clients, and of all with slurmctld."""
    before, of_controller = clients(), controller(conf)
    for dummy in range(times):
        act()
    used = clients() - before
    return used / times, (used + controller(conf) - of_controller) / times


def main() -> None:
    with slurm_lab.up("--nodes", "0", "--records", str(NODES)) as conf:
        environment = {**os.environ, "SLURM_CONF": conf}
        script = "#!/bin/sh\nsleep 1\n"
        for dummy in range(JOBS // 1000):
            subprocess.run(
                ["sbatch", "--array=1-1000", "--gres=gpu:1", "--hold", "--output=/dev/null"],
                input=script, text=True, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip

        def bare() -> None:
            for argv in (["scontrol", "-o", "-d", "show", "node"], ["squeue", "--noheader", "--all"]):
                subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60)

        def least() -> None:
            bare()
            for argv in (["scontrol", "ping"], ["scontrol", "-o", "show", "reservation"]):
                subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60)
            with fleet.uncollected():
                [fleet.Node(str(number)) for number in range(NODES)]

        backend = Slurm(Commands(execution.run, conf=conf))
        peer_clients, peer = cpu(conf, bare)
        dummy, floor = cpu(conf, least)
        ours_clients, ours = cpu(conf, lambda: backend.snapshot([]))
        started = time.monotonic()
        snapshot = backend.snapshot([])
        wall = time.monotonic() - started
    result = {
        "bench": "slurm_snapshot_vs_scontrol",
        "ratio": round(ours / peer, 2),
        "ours": round(ours, 3),
        "peer": round(peer, 3),
        "floor": round(floor / peer, 2),
        "unit": "s CPU",
        "aim": AIM,
        "peer_is": "scontrol -o -d show node; squeue",
        "nodes": len(snapshot.nodes),
        "wall_s": round(wall, 2),
        "clients_s": round(ours_clients, 3),
        "peer_clients_s": round(peer_clients, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
