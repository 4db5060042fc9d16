# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A counter in a container of a real podman, with runc and CRIU: in podman's own network, with its port published, and
the stand-in driver's device files. Its image is made here; programs come from the machine's /usr, as NVIDIA's container
toolkit mounts its libraries.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet import Fleet
from node import Node
from works import NODES

IMAGE = "localhost/bare"
# What a container's own /proc lacks here, the stand-in driver finds below /standin: it is no kernel's
ROOT = """
root=$(mktemp -d)
mkdir -p $root/{usr,etc,proc,sys,dev,run,tmp,var/lib,standin/proc/driver}
for place in bin sbin lib lib64; do ln -s usr/$place $root/$place; done
for place in dev run; do ln -s /$place $root/standin/$place; done
cp /etc/ld.so.preload $root/etc
tar -C $root -c . | podman import --quiet --change 'CMD ["/usr/lib/gpufleet-lab/gpu-counter"]' - localhost/bare
"""
MOUNTS = ["/usr:/usr:ro", "/sys/module:/sys/module:ro", "/proc/driver:/standin/proc/driver:ro"]


class Box:
    """A counter in a container, on the machine's port 8090."""

    def __init__(self, name: str, node: Node, *flags: str) -> None:
        self.name = name
        self.home = f"/var/lib/{name}"
        words = ["podman", "run", "--detach", "--name", name, "--publish", "8090:8090", *flags]
        for mount in (*MOUNTS, f"{self.home}:{self.home}"):
            words += ["--volume", mount]
        for setting in ("NVIDIA_STANDIN_ROOT=/standin", f"STATE_DIRECTORY={self.home}", "PORT=8090", "GPU_MIB=1"):
            words += ["--env", setting]
        devices = "$(printf -- '--device %s ' /dev/nvidia*)"
        self.id = node.sh(f"mkdir {self.home} && {shlex.join(words)} {devices} {IMAGE}")
        self.wait_for(node, 2)

    def declared(self) -> dict[str, Any]:
        save = {"paths": [self.home], "progress": ["sh", "-c", f"wc -l <{self.home}/steps.log"]}
        return {"name": self.name, "container": self.name, "save": save}

    def steps(self, node: Node) -> list[int]:
        return [int(line.split()[0]) for line in node.sh(f"cat {self.home}/steps.log").splitlines()]

    def wait_for(self, node: Node, step: int) -> None:
        """Until that step has been taken on a machine."""
        until = f'[ "$(wc -l <{self.home}/steps.log)" -ge {step} ]'
        node.sh(f"timeout 60 sh -c {shlex.quote(f'until {until}; do sleep 0.1; done')} 2>/dev/null")

    def assert_goes_on(self, node: Node, more: int = 2) -> None:
        """It takes steps there, as itself and in its own control group; none was lost, and none done twice."""
        self.wait_for(node, len(self.steps(node)) + more)
        steps = self.steps(node)
        assert steps == list(range(1, len(steps) + 1)), "steps were lost or repeated"
        about = json.loads(node.sh(f"podman container inspect {self.name}"))[0]
        assert about["Id"] == self.id and about["State"]["Running"], about["State"]
        assert self.id in node.sh(f"cat /proc/{about['State']['Pid']}/cgroup")
        page = "import urllib.request as u; print(u.urlopen('http://localhost:8090/', timeout=10).read().decode())"
        assert json.loads(node.sh(f'python3 -c "{page}"'))["step"] >= steps[-1]


def share(fleet: Fleet) -> Path:
    return fleet.state.parent / "share"


def load_image(node: Node) -> None:
    """Have the image on a machine; it is made once."""
    if not (share(node.fleet) / "bare.tar").exists():
        node.sh(f"{ROOT}podman save --quiet {IMAGE} >{share(node.fleet)}/bare.tar")
    node.sh(f"podman image exists {IMAGE} || podman load --quiet <{share(node.fleet)}/bare.tar")


@contextmanager
def machines(fleet: Fleet) -> Iterator[dict[str, Node]]:
    """The machines by name, with the image; without containers afterwards, also before a new start, which would leave
    podman's network rules."""
    nodes = {name: Node(fleet, name) for name in NODES}
    for node in nodes.values():
        load_image(node)
    try:
        yield nodes
    finally:
        for node in nodes.values():
            node.sh("podman rm --force --all --time 0; rm -rf /var/lib/notebook /var/lib/gpufleet")
