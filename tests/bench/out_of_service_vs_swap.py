# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a node is out of service in an upgrade, against the bare swap of the driver on the same machine.

Ours: upgrade.yml on one node of the hosts lab, from cordon to uncordon, with everything it checks, saves, restores and
proves on the way. Peer: what nothing can do without, as one shell script on the node: stop the work and the driver's
client, unload, swap the packages, load, start both again, see that the work answers and that every GPU is listed. No
record, no way back.

Both move the same packages, downloaded before: 350 MB in a dozen packages, with ldconfig, depmod and a daemon-reload
by their scripts. What their scripts build takes ten seconds here, about what linking prebuilt modules and writing an
initramfs take on a server; a DKMS build takes minutes on top, which would only flatter the ratio. For the ratio without
those seconds see ratio_without_build. The node is not a canary; a canary is measured before and after in addition.
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/integration"))

from fleet import Fleet  # noqa: E402

AIM = 1.5
NODE, OLD, NEW = "gpu-1", "535.183.01", "550.90.07"
PAYLOAD_MB = 350
BUILD_SECONDS = 10
ROUNDS = 3
PACKAGE = "nvidia-driver-550-server"
ANSWERS = "python3 -c \"import urllib.request as u; u.urlopen('http://localhost:8000/', timeout=1)\" 2>/dev/null"
SWAP = f"""
set -e
began=$(date +%s.%N)
gpus=$(nvidia-smi -L | wc -l)
systemctl stop gpu-counter nvidia-persistenced
modprobe -r nvidia-uvm nvidia-drm nvidia-modeset nvidia
DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-download install {PACKAGE} >/dev/null 2>&1
for module in nvidia nvidia-modeset nvidia-drm nvidia-uvm; do modprobe $module; done
systemctl start nvidia-persistenced gpu-counter
for try in $(seq 100); do {ANSWERS} && break; sleep 0.1; done
test "$(nvidia-smi -L | wc -l)" = "$gpus"
echo $began $(date +%s.%N)
"""
HOOK = """#!/bin/sh
echo "$1 $(date +%s.%N)" >> {log}
"""


@dataclass(frozen=True)
class Round:
    """Seconds out of service, seconds without an answer from the work, and packages downloaded meanwhile."""

    out: float
    silent: float
    fetched: int


class Watch(threading.Thread):
    """Asks the workload 20 times a second how it is, and keeps when it answered."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.answers: list[tuple[float, str]] = []
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.wait(0.05):
            connection = http.client.HTTPConnection(self.address, 8000, timeout=1)
            try:
                connection.request("GET", "/")
                self.answers.append((time.time(), json.load(connection.getresponse())["driver"]))
            except (OSError, http.client.HTTPException, ValueError):
                pass  # stopped, or ended in the middle of its answer
            finally:
                connection.close()

    def wait_for(self, driver: str, deadline: float) -> None:
        """Until the workload runs under that driver."""
        limit = time.monotonic() + deadline
        while not self.answers or self.answers[-1][1] != driver:
            if time.monotonic() > limit:
                raise SystemExit(f"{NODE}: the workload does not run under driver {driver} after {deadline:.0f} s")
            time.sleep(0.05)

    def gap(self) -> tuple[float, float]:
        """Start and end of the longest silence, as seconds since the epoch."""
        self.enough.set()
        times = [at for at, _driver in self.answers]
        return max(zip(times, times[1:]), key=lambda pair: pair[1] - pair[0])


def downloads(log: Path, start: float, end: float) -> int:
    """Packages the machines fetched from the lab's repository in that time."""
    count = 0
    for stamp in re.findall(r'\[([^\]]+)\] "GET \S+\.deb', log.read_text()):
        when = datetime.strptime(stamp, "%d/%b/%Y %H:%M:%S").timestamp()
        count += start + 1 <= when <= end - 1
    return count


def measure(fleet: Fleet, address: str, act: Callable[[], tuple[float, float]]) -> Round:
    """One swap of a fresh machine; ``act`` gives the moments at which it left service and came back."""
    fleet.lab("reset")
    fleet.sh(NODE, f"mkdir -p /etc/nvidia-standin && echo {BUILD_SECONDS} > /etc/nvidia-standin/dkms-seconds")
    watch = Watch(address)
    watch.start()
    watch.wait_for(OLD, 60)
    left, came_back = act()
    watch.wait_for(NEW, 60)
    start, end = watch.gap()
    watch.join()
    return Round(came_back - left, end - start, downloads(fleet.state / "repo.log", left, came_back))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="bench-hosts-") as directory:
        fleet = Fleet("hosts", Path(directory), [NODE])
        fleet.lab("up", "--nodes", "1", "--workload", "--payload-mb", str(PAYLOAD_MB), timeout=2400)
        log, hook = fleet.state / "service.log", fleet.state / "balancer"
        hook.write_text(HOOK.format(log=log))
        hook.chmod(0o755)
        try:
            address = json.loads((fleet.state / "lab.json").read_text())["nodes"][0]["address"]

            def play() -> tuple[float, float]:
                log.unlink(missing_ok=True)
                played = fleet.play(
                    "upgrade",
                    gpu_driver_version=NEW,
                    gpu_canary=0,
                    gpu_workloads=[{"name": "counter", "unit": "gpu-counter.service", "ready": ["sh", "-c", ANSWERS]}],
                    gpu_scheduler_options={
                        "cordon_command": [str(hook), "cordon", "{node}"],
                        "uncordon_command": [str(hook), "uncordon", "{node}"],
                        "state_dir": str(fleet.state / "marks"),
                    },
                )
                if played.rc:
                    raise SystemExit(f"upgrade.yml failed:\n{played.output[-3000:]}")
                told = dict(line.split() for line in log.read_text().splitlines())
                return float(told["cordon"]), float(told["uncordon"])

            def swap() -> tuple[float, float]:
                fleet.sh(NODE, f"apt-get -qq -y --download-only install {PACKAGE}")
                began, ended = fleet.sh(NODE, SWAP).split()
                return float(began), float(ended)

            ours, peer = [], []
            for number in range(ROUNDS):
                peer.append(measure(fleet, address, swap))
                ours.append(measure(fleet, address, play))
                print(f"round {number + 1}: ours {ours[-1].out:.1f} s, swap {peer[-1].out:.1f} s", file=sys.stderr)
        finally:
            fleet.lab("down")
    mine, floor = (statistics.median(one.out for one in rounds) for rounds in (ours, peer))
    fetched = max(one.fetched for one in ours)
    result = {
        "bench": "out_of_service_vs_swap",
        "ratio": round(mine / floor, 2),
        "ours": round(mine, 2),
        "peer": round(floor, 2),
        "unit": "s",
        "aim": AIM,
        "peer_is": "stop, unload, swap the packages, load, start, check: one script, packages at hand",
        "ratio_without_build": round((mine - BUILD_SECONDS) / (floor - BUILD_SECONDS), 2),
        "package_mb": PAYLOAD_MB,
        "build_s": BUILD_SECONDS,
        "rounds": ROUNDS,
        "ours_range": [round(pick(one.out for one in ours), 2) for pick in (min, max)],
        "peer_range": [round(pick(one.out for one in peer), 2) for pick in (min, max)],
        "work_silent": [round(statistics.median(one.silent for one in rounds), 2) for rounds in (ours, peer)],
        "downloads_while_out": fetched,
    }
    print(json.dumps(result))
    if fetched:
        print(f"{fetched} packages were downloaded while the node was out: stage has to fetch them", file=sys.stderr)
    return 1 if fetched else 0


if __name__ == "__main__":
    sys.exit(main())
