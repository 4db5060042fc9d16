# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a node's work stands still in an upgrade, against the bare swap of the driver on the same machine.

Ours: upgrade.yml on one node of the hosts lab, with everything it checks, saves, restores and proves on the way.
Peer: what nothing can do without, as one shell script on the node, with the packages already downloaded: stop the
clients, unload, swap the packages, load, start the clients. No check, no way back.

Both are measured from outside, as a user of the workload sees it: the longest time without an answer from it.
The packages have some weight, so that downloading or unpacking more than needed while the work stands still shows.
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
from datetime import datetime
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/integration"))

from fleet import Fleet  # noqa: E402

NODE, OLD, NEW = "gpu-1", "535.183.01", "550.90.07"
PAYLOAD_MB = 100
ROUNDS = 3
PACKAGE = "nvidia-driver-550-server"
SWAP = f"""
set -e
systemctl stop gpu-counter nvidia-persistenced
modprobe -r nvidia-uvm nvidia-drm nvidia-modeset nvidia
DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-download install {PACKAGE} >/dev/null 2>&1
for module in nvidia nvidia-modeset nvidia-drm nvidia-uvm; do modprobe $module; done
systemctl start nvidia-persistenced gpu-counter
"""


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


def measure(fleet: Fleet, address: str, act: Callable[[], None]) -> tuple[float, int]:
    """Seconds of silence, and packages downloaded during it, while ``act`` moves a fresh machine to the new driver."""
    fleet.lab("reset")
    watch = Watch(address)
    watch.start()
    watch.wait_for(OLD, 60)
    act()
    watch.wait_for(NEW, 60)
    start, end = watch.gap()
    watch.join()
    return end - start, downloads(fleet.state / "repo.log", start, end)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="bench-hosts-") as directory:
        fleet = Fleet("hosts", Path(directory), [NODE])
        fleet.lab("up", "--nodes", "1", "--workload", "--payload-mb", str(PAYLOAD_MB), timeout=2400)
        try:
            address = json.loads((fleet.state / "lab.json").read_text())["nodes"][0]["address"]

            def play() -> None:
                workloads = [{"name": "counter", "unit": "gpu-counter.service"}]
                # A stand-in GPU copies as fast as the host's busy memory happens to: nothing to judge a driver by.
                variables = {"gpu_workloads": workloads, "gpu_baseline_tolerance": 100}
                played = fleet.play("upgrade", gpu_driver_version=NEW, **variables)
                if played.rc:
                    raise SystemExit(f"upgrade.yml failed:\n{played.output[-3000:]}")

            def swap() -> None:
                fleet.sh(NODE, f"apt-get -qq -y --download-only install {PACKAGE}")
                fleet.sh(NODE, SWAP)

            ours, peer = [], []
            for number in range(ROUNDS):
                peer.append(measure(fleet, address, swap))
                ours.append(measure(fleet, address, play))
                print(f"round {number + 1}: ours {ours[-1][0]:.1f} s, swap {peer[-1][0]:.1f} s", file=sys.stderr)
        finally:
            fleet.lab("down")
    mine, floor = (statistics.median(seconds for seconds, _count in rounds) for rounds in (ours, peer))
    fetched = max(count for _seconds, count in ours)
    result = {
        "bench": "out_of_service_vs_swap",
        "ratio": round(mine / floor, 2),
        "ours": round(mine, 2),
        "peer": round(floor, 2),
        "unit": "s",
        "peer_is": "stop, unload, swap the packages, load, start: one script, packages at hand, nothing checked",
        "package_mb": PAYLOAD_MB,
        "rounds": ROUNDS,
        "ours_range": [round(pick(seconds for seconds, _count in ours), 2) for pick in (min, max)],
        "peer_range": [round(pick(seconds for seconds, _count in peer), 2) for pick in (min, max)],
        "downloads_while_out": fetched,
    }
    print(json.dumps(result))
    if fetched:
        print(
            f"{fetched} packages were downloaded while the work stood still: stage has to fetch them", file=sys.stderr
        )
    return 1 if fetched else 0


if __name__ == "__main__":
    sys.exit(main())
