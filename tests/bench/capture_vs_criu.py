# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wall time of a whole capture of 1 GiB over that of suspending CUDA and a bare ``criu dump``. Aim: 1.3 or less.

Ours looks twice at the processes, suspends CUDA, dumps, hashes every byte, writes all to disk and reads the manifest
back; bare CRIU leaves its images in the page cache. Each has a new process every time, and they take turns in being the
first: whoever writes to memory that a virtual machine has not touched before waits for its host.
"""

from __future__ import annotations

import json
from typing import Any

import saves


def main() -> None:
    ours: list[dict[str, Any]] = []
    peer: list[float] = []
    with saves.bench() as made:

        def capture() -> None:
            made.fresh()
            captured = made.ours("ours").capture(made.work)
            ours.append({"ours": captured.seconds, **captured.evidence["timings"]})

        def dump() -> None:
            made.fresh()
            peer.append(made.criu_dump())

        for act in (capture, dump, dump, capture, capture, dump):
            act()
    best = min(ours, key=lambda one: float(one["ours"]))
    result = {"bench": "capture_vs_criu", "ratio": round(best["ours"] / min(peer), 2)}
    print(json.dumps({**result, "peer": round(min(peer), 2), "unit": "s for 1 GiB", **best}))


if __name__ == "__main__":
    main()
