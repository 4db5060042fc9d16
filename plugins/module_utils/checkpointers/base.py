# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a way of saving work is asked for, and the words in which it says why it could not.

A checkpointer is one file beside this one with a subclass of :class:`Checkpointer`. It runs on the node that has the
work. Every method may be repeated after a crash: it looks at what is there before it acts, and a step counts as done
when it was seen to be, never because a command returned 0.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

REASONS = (
    "unsupported_backend",
    "unsupported_feature",
    "key_mismatch",
    "no_target",
    "insufficient_host_ram",
    "insufficient_gpu_memory",
    "insufficient_space",
    "lock_timeout",
    "checkpoint_failed",
    "dump_failed",
    "publish_failed",
    "hash_mismatch",
    "restore_timeout",
    "restore_failed",
    "cuda_restore_failed",
    "verify_failed",
    "lost_source",
    "policy",
)
"""Why something was not saved or not restored. Two of them name what they are about: ``unsupported_feature:mps``,
``key_mismatch:driver``."""

SOURCE_RUNNING, SOURCE_FROZEN, SOURCE_GONE, SOURCE_LOST = "running", "frozen", "gone", "lost"
SOURCE_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reason:
    """Why a step did not succeed. ``source`` says how the work is at its source now: running, frozen, gone, lost
    (neither running nor saved), or unknown. ``next`` is the command that looks further."""

    reason: str
    step: str
    observed: str
    expected: str
    next: str
    source: str = SOURCE_RUNNING
    workload: str = ""
    member: str = ""
    pid: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        who = f"{self.workload}: " if self.workload else ""
        return (
            f"{who}{self.reason} at {self.step}: {self.observed}, expected {self.expected}; "
            f"the work is {self.source} at its source; next: {self.next}"
        )


class CheckpointError(Exception):
    """A step that did not succeed; everything it changed was undone as far as ``reason.source`` says."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True)
class Capabilities:
    """What a checkpointer can do, as data for whoever chooses between them."""

    keeps_source_frozen: bool
    """Nothing happens to the work between the save and its end at the source."""
    moves_nodes: bool
    survives_driver_change: bool
    multi_process: bool
    multi_gpu: bool
    needs_launch_time_setup: bool

    def as_dict(self) -> dict[str, bool]:
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """One workload on this node, as its owner declares it: a ``unit``, or a ``container`` of ``engine``. ``save`` are
    the options of its checkpointer; ``ready`` an argument list that exits with 0 once the work does what it is for."""

    name: str
    unit: str | None = None
    save: Mapping[str, Any] = field(default_factory=dict)
    ready: tuple[str, ...] = ()
    ready_timeout: float = 120.0
    container: str | None = None
    engine: str = "podman"


@dataclass(frozen=True)
class Estimate:
    """Bytes of the artefact, host memory needed on top while it is taken (bytes), and seconds the work stands still."""

    bytes: int
    host_ram: int
    seconds: float


@dataclass(frozen=True)
class Captured:
    """A save that was proven to be one. ``artefact`` is its id in the store, or what names it to the application;
    ``source`` is how the work is now."""

    workload: str
    backend: str
    artefact: str
    source: str
    bytes: int = 0
    seconds: float = 0.0
    frozen_since: float | None = None
    target: str | None = None
    """Where it goes on, if it was ended here in favour of another node before."""
    changed: bool = True
    digest: str = ""
    """SHA-256 of its manifest, which whoever restores it compares."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Checkpointer(ABC):
    """One way of saving work and of bringing it back. Every method raises :class:`CheckpointError`."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    def probe(self) -> Sequence[Reason]:
        """What this node lacks to use it at all; empty if it can."""

    @abstractmethod
    def check(self, work: Work) -> Sequence[Reason]:
        """Why this work cannot be saved this way, without touching it."""

    @abstractmethod
    def estimate(self, work: Work) -> Estimate:
        """What a capture would cost."""

    @abstractmethod
    def capture(self, work: Work) -> Captured:
        """Save the work and prove the save; on failure it runs on."""

    @abstractmethod
    def abort(self, work: Work) -> str:
        """Let a captured work run on at its source; how it is then."""

    @abstractmethod
    def commit(self, work: Work, target: str) -> str:
        """End a captured work at its source for good, in favour of ``target``; how it is then."""

    @abstractmethod
    def restore(self, work: Work, artefact_id: str) -> Mapping[str, Any]:
        """Bring a saved work to life on this node and prove that it goes on; the evidence."""

    @abstractmethod
    def verify(self, work: Work) -> Mapping[str, Any]:
        """Prove that a restored work goes on; the evidence."""

    @abstractmethod
    def discard(self, work: Work, artefact_id: str) -> bool:
        """Forget a save that is no longer needed; whether there was something to forget."""
