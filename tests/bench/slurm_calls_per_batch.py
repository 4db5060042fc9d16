# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands of Slurm that one batch of idle nodes takes from cordon to uncordon, over those of a loop over its nodes.

The loop is what the runbook says for each node: drain, look twice, reserve, resume, look, srun, drain, look, end the
reservation, resume, look. Both are counted on real daemons, with 5,000 further node records."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from typing import Any

import slurm_lab

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm import Settings, Slurm
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_commands import Commands

NODES, RECORDS, LOOP = 16, 5000, 12
AIM = 0.5


def main() -> None:
    names = [f"gpu-{number}" for number in range(1, NODES + 1)]
    calls: Counter[str] = Counter()
    lock = threading.Lock()

    def counted(argv: list[str], **options: Any) -> execution.Completed:
        with lock:
            calls[next(word for word in argv if word.endswith(("scontrol", "squeue", "srun", "scancel")))] += 1
        return execution.run(argv, **options)

    with slurm_lab.up("--nodes", str(NODES), "--records", str(RECORDS)) as conf:
        backend = Slurm(Commands(counted, conf=conf), Settings(command=["true"]))
        mark = Mark("bench", time.time())
        started = time.monotonic()
        failed = [result for result in backend.cordon(names, mark).values() if result.failed]
        emptied = backend.evacuate(names, mark, [], time.time() + 60, 30)
        failed += [result for result in backend.validate(names, mark, {}, 60).values() if result.failed]
        failed += [result for result in backend.uncordon(names, mark).values() if result.failed]
        wall = time.monotonic() - started
    if failed or any(result.waiting for result in emptied.values()):
        raise SystemExit(f"the batch did not go through: {failed or emptied}")
    ours, peer = sum(calls.values()), LOOP * NODES
    result = {
        "bench": "slurm_calls_per_batch",
        "ratio": round(ours / peer, 2),
        "ours": ours,
        "peer": peer,
        "unit": "commands",
        "aim": AIM,
        "peer_is": f"{LOOP} commands for each of {NODES} nodes",
        "by_command": dict(calls),
        "wall_s": round(wall, 1),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
