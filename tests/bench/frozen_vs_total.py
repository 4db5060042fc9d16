# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Share of the wall time of a whole capture of 1 GiB during which the work stands still: from the first step that may
hold it up until its save is published and it could be ended. The looks, the checks and the record come before that."""

from __future__ import annotations

import json
import time

import saves


def main() -> None:
    best = (float("inf"), 0.0)
    with saves.bench() as made:
        for dummy in range(3):
            made.fresh()
            backend = made.ours("ours")
            began = time.monotonic()
            captured = backend.capture(made.work)
            total = time.monotonic() - began
            best = min(best, (total, sum(captured.evidence["timings"].values())))
    total, frozen = best
    result = {"bench": "frozen_vs_total", "ratio": round(frozen / total, 2)}
    print(json.dumps({**result, "frozen": round(frozen, 2), "total": round(total, 2), "unit": "s for 1 GiB"}))


if __name__ == "__main__":
    main()
