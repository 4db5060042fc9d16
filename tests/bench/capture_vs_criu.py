# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wall time of a whole capture of 1 GiB over that of a bare ``criu dump`` of the same process. Aim: 1.3 or less.

Ours looks twice at the processes, suspends CUDA, dumps, hashes every byte, writes all to disk and reads the manifest
back; bare CRIU leaves its images in the page cache. The process is suspended before bare CRIU starts.
"""

from __future__ import annotations

import json
import os

import saves


def main() -> None:
    ours, peer, steps = [], [], {}
    with saves.bench() as made:
        for dummy in range(3):
            backend = made.ours("ours")
            made.unit.start()
            captured = backend.capture(made.work)
            ours.append(captured.seconds)
            steps = captured.evidence["timings"]
            backend.abort(made.work)
            made.suspend(made.unit.pid, "lock", "checkpoint")
            os.sync()
            peer.append(made.criu_dump(made.unit.pid))
            made.unit.end(lambda: [], 10)
    result = {"bench": "capture_vs_criu", "ratio": round(min(ours) / min(peer), 2)}
    print(
        json.dumps({**result, "ours": round(min(ours), 2), "peer": round(min(peer), 2), "unit": "s for 1 GiB", **steps})
    )


if __name__ == "__main__":
    main()
