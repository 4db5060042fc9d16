# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Throughput of hashing an artefact of one big file over that of sha256sum on a file for each core. Aim: 0.9 or more.

CRIU writes the memory of a process into one file, of which sha256sum can use one core only; its throughput here is that
of all cores, each with a file of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact

SIZE = 1 << 30


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        block = os.urandom(1 << 20)
        with (folder / "pages-1.img").open("wb") as whole:
            for dummy in range(SIZE >> 20):
                whole.write(block)
        parts = [folder / f"part-{index}" for index in range(cores)]
        for part in parts:
            with part.open("wb") as stream:
                for dummy in range((SIZE >> 20) // cores):
                    stream.write(block)
        ours, peer = [], []
        for dummy in range(3):
            began = time.monotonic()
            artefact.hash_files(folder, ["pages-1.img"])
            ours.append(time.monotonic() - began)
            began = time.monotonic()
            running = [subprocess.Popen(["sha256sum", part], stdout=subprocess.DEVNULL) for part in parts]
            if any(process.wait() for process in running):
                raise SystemExit("sha256sum failed")
            peer.append(time.monotonic() - began)
    mine, theirs = SIZE / min(ours) / 1e9, SIZE / min(peer) / 1e9
    result = {
        "bench": "hash_vs_sha256sum",
        "ratio": round(mine / theirs, 2),
        "ours": round(mine, 2),
        "peer": round(theirs, 2),
    }
    print(json.dumps({**result, "unit": "GB/s", "cores": cores}))


if __name__ == "__main__":
    main()
