# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wall time of a whole capture of 1 GiB over that of suspending CUDA and a bare ``criu dump``. Aim: 1.3 or less.

Ours looks at the processes, suspends CUDA, dumps, hashes every byte, writes all to disk and reads the manifest back.
Bare CRIU leaves its images in the page cache, where a machine that fails loses them and nobody sees a flipped byte. So
there is a second ratio, to what is worth the same: the bare dump, then ``sync`` and ``sha256sum`` of its files at once.

Each has a new process every time, and they take turns in being the first: whoever writes to memory that a virtual
machine has not touched before waits for its host.
"""

from __future__ import annotations

import json
import time
from typing import Any

import saves


def main() -> None:
    ours: list[dict[str, Any]] = []
    peer: list[float] = []
    durable: list[float] = []
    with saves.bench() as made:

        def capture() -> None:
            made.fresh()
            backend = made.ours("ours")
            began = time.monotonic()
            captured = backend.capture(made.work)
            ours.append({"ours": round(time.monotonic() - began, 3), **captured.evidence["timings"]})

        def dump() -> None:
            made.fresh()
            peer.append(made.criu_dump())
            durable.append(peer[-1] + made.durable())

        for act in (capture, dump, dump, capture, capture, dump):
            act()
    best = min(ours, key=lambda one: float(one["ours"]))
    ratios = {"ratio": round(best["ours"] / min(peer), 2), "ratio_durable": round(best["ours"] / min(durable), 2)}
    peers = {"peer": round(min(peer), 2), "peer_durable": round(min(durable), 2)}
    print(json.dumps({"bench": "capture_vs_criu", **ratios, **peers, "unit": "s for 1 GiB", **best}))


if __name__ == "__main__":
    main()
