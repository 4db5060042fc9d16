# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Save a systemd service with its GPU memory: the driver's calls move that into the processes, CRIU saves those.

The order is one of two phases over all processes of the service (lock all, checkpoint all; restore all, unlock all),
and each state is read back. CRIU's own CUDA plugin is kept out: it swallows the errors of a restore and knows no device
map. The source stands still until the artefact is hashed, published and read back, and is ended only then; a timer on
the node lets it go on should everybody else disappear. A record in the state directory says how far a workload is.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.artefact import remove as remove_artefact
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_FROZEN,
    Capabilities,
    Checkpointer,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.carried import remove
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import (
    COMMITTED,
    COMMITTING,
    ENDING,
    RUNNING,
    STARTING,
    UNLOCKING,
    UNPACKING,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.home import LEFT, Home
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.source import Source
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.target import Target


class CudaCriu(Source, Target, Home, Checkpointer):
    """Processes of a systemd service, each saved with what it has on its GPUs."""

    capabilities = Capabilities(
        keeps_source_frozen=True,
        moves_nodes=True,
        survives_driver_change=False,
        multi_process=True,
        multi_gpu=True,
        needs_launch_time_setup=False,
    )

    def discard(self, work: Work, artefact_id: str) -> bool:
        """Forget a save, and what is remembered of it once nothing depends on that any more. Work that was taken in is
        remembered for as long as it is here."""
        for side in ("checkpoints", "restores"):
            with self._held(work, side) as (path, record):
                if record.get("artefact") != artefact_id:
                    continue
                state = record.get("state")
                if state == COMMITTING and not suspend.same(record["members"], self._proc):
                    state = COMMITTED
                if state in (suspend.FROZEN, suspend.PUBLISHED, COMMITTING, STARTING, UNLOCKING, UNPACKING, ENDING):
                    raise self._failed(
                        work,
                        "policy",
                        "discard",
                        f"{path} says {state}",
                        "a save nobody waits for",
                        f"cat {path}",
                        SOURCE_FROZEN,
                    )
                self._put_back(work, path, record)
                for one in record.get("aside", ()):
                    remove(one["kept"])
                if state == LEFT:
                    self._service(record["unit"]).forget()
                if state == RUNNING and not record.get("own"):
                    record.update(aside=[])
                    suspend.write_record(path, record)
                else:
                    path.unlink()
        return remove_artefact(self._store, artefact_id)
