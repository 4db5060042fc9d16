# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wall time of restoring a prepared save of 1 GiB over that of bare ``criu restore`` and waking CUDA. Aim: 1.3 or less.

Ours checks that the save is what was compared when it was prepared, restores, wakes CUDA and proves that it computes.
The comparison of every byte is part of preparing, while the source still stands, and is told besides.
"""

from __future__ import annotations

import json
import time

import saves


def main() -> None:
    ours: list[float] = []
    peer: list[float] = []
    compared: list[float] = []
    with saves.bench() as made:

        def restore() -> None:
            made.fresh()
            artefact = made.ours("ours").capture(made.work).artefact
            made.end()
            target = made.ours("ours")
            began = time.monotonic()
            target.prepare(made.work, artefact)
            compared.append(time.monotonic() - began)
            began = time.monotonic()
            target.restore(made.work, artefact)
            ours.append(time.monotonic() - began)

        def bare() -> None:
            made.fresh()
            made.criu_dump()
            made.end()
            peer.append(made.criu_restore())

        for act in (restore, bare, bare, restore, restore, bare):
            act()
    result = {"bench": "restore_vs_criu", "ratio": round(min(ours) / min(peer), 2)}
    times = {"ours": round(min(ours), 2), "peer": round(min(peer), 2), "unit": "s for 1 GiB"}
    print(json.dumps({**result, **times, "compared_before": round(min(compared), 2)}))


if __name__ == "__main__":
    main()
