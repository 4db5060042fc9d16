# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""On a lab machine: carry out one side of a move as the modules do, with limits of the test's own (``limits``), and say
why it failed; or (``after``) end without a word right after one of its acts, as a module does that is killed.
Usage: die.py FOLDER ORDER, where FOLDER holds the collection's module_utils."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, sys.argv[1])

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError, Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.container import Podman, Renamed
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Moved, Service

OWNERS = {
    "suspend": suspend,
    "artefact": artefact,
    "backend": CudaCriu,
    "service": Service,
    "moved": Moved,
    "podman": Podman,
    "renamed": Renamed,
}


def die_after(owner: Any, name: str, time: int) -> None:
    act = getattr(owner, name)
    calls = 0

    def last(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = act(*args, **options)
        if calls == time:
            os._exit(137)
        return result

    setattr(owner, name, last)


def main() -> None:
    order = json.loads(sys.argv[2])
    given = order["work"]
    if "after" in order:
        owner, name, time = order["after"]
        die_after(OWNERS[owner], name, time)
    backend = CudaCriu(
        execution.run,
        "/var/lib/gpufleet",
        order["store"],
        node=os.uname().nodename,
        criu=order.get("criu", "criu"),
        limits=Limits(**{"settle": 1.0, "lock": 1.0, **order.get("limits", {})}),
    )
    work = Work(given["name"], given.get("unit"), given["save"], container=given.get("container"))
    try:
        if order["act"] == "capture":
            backend.capture(work)
        elif order["act"] == "commit":
            backend.commit(work, order["target"])
        else:
            backend.restore(work, order["artefact"])
    except CheckpointError as exc:
        print(json.dumps(exc.reason.as_dict()), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
