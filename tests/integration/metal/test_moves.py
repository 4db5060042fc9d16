# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only real kernels can show of a move: saved work counts for no reference to the modules, so that they could be
unloaded under it; once it has moved they can be, and it goes on above another kernel.

What may go wrong in a move, and a whole upgrade with work that moves and comes home, are tested in ../moves.
"""

from __future__ import annotations

from collections.abc import Callable

from fleet import Fleet
from node import Node

HOME = "/var/lib/gpu-counter"
COUNTER = {
    "name": "counter",
    "unit": "gpu-counter.service",
    "ready": ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000')"],
    "save": {"paths": [HOME], "progress": ["sh", "-c", f"wc -l <{HOME}/steps.log"]},
}
MODULES = "nvidia_drm nvidia_modeset nvidia_uvm nvidia"


def test_a_counter_moves_to_another_kernel_and_lets_go_of_its_own(fleet: Callable[[int], Fleet]) -> None:
    """Each step is written down before the next is taken, and the count is in "GPU" memory: a step that was lost or
    done twice, or memory that came back wrong, shows."""
    machines = fleet(2)
    for name in machines.names:  # stand-in GPUs that are small enough for the machines' memory
        machines.sh(name, "mkdir -p /etc/nvidia-standin; echo proc_used_mib=8 >>/etc/nvidia-standin/state")
    home, away = (Node(machines, name) for name in machines.names)
    # under an id that the second machine has free, as it would be in a PID namespace
    home.sh("echo 20000 >/proc/sys/kernel/ns_last_pid; systemctl start gpu-counter")
    home.sh(f"timeout 60 sh -c 'until [ -s {HOME}/steps.log ]; do sleep 0.2; done'")

    saved = home.run("workload_checkpoint", state="captured", workloads=[COUNTER])
    assert not saved["failed"] and saved["workloads"][0]["source"] == "frozen", saved
    pid = saved["workloads"][0]["evidence"]["pids"][0]
    seen = home.run("module_holders_info")
    assert pid not in [one["pid"] for one in seen["holders"]], "it has let go of the device files"
    assert pid in [one["pid"] for one in seen["suspended"]] and not seen["releasable"], seen

    order = {"workloads": [{**COUNTER, "artefact": saved["workloads"][0]["artefact"]}]}
    for done in (
        away.run("checkpoint_fetch", artefact=order["workloads"][0]["artefact"], source=home.name),
        away.run("workload_restore", state="prepared", **order),
        home.run("workload_checkpoint", state="committed", target=away.name, **order),
    ):
        assert not done["failed"], done
    home.sh(f"systemctl stop nvidia-persistenced; rmmod {MODULES}")  # while the work is nowhere but in its save
    restored = away.run("workload_restore", state="restored", settle=3, **order)
    assert not restored["failed"], restored
    taken = len(away.sh(f"cat {HOME}/steps.log").splitlines())
    log = away.sh(
        f"timeout 60 sh -c 'until [ $(wc -l <{HOME}/steps.log) -gt {taken} ]; do sleep 0.2; done'; cat {HOME}/steps.log"
    )
    rows = [line.split() for line in log.splitlines()]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1)), "steps were lost or repeated"
    hosts = [row[1] for row in rows]
    assert [host for index, host in enumerate(hosts) if not index or hosts[index - 1] != host] == machines.names
