# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a scheduler is asked for: take nodes out of service and put them back, and know whose doing it was.

A scheduler is one file beside this one with a subclass of :class:`Scheduler`, named in registry.py. Everything takes
and gives many nodes at once, so that a system with a central API is asked with few, concurrent requests.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


class SchedulerError(Exception):
    """Nothing can be done for any node; the text says what was found, expected and to be done next."""


@dataclass(frozen=True)
class Mark:
    """What is left with a node that is taken out of service, so that any later run knows whose doing it was."""

    run_id: str
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class State:
    """Whether a node is out of service, and the run that took it out if it was one of ours."""

    cordoned: bool
    ours: bool = False
    run_id: str | None = None

    def describe(self) -> str:
        if not self.cordoned:
            return "in service"
        return (
            f"out of service, taken out by run {self.run_id}" if self.ours else "out of service, not by this collection"
        )


@dataclass(frozen=True)
class NodeResult:
    """What became of one node. ``before`` and ``after`` are its states around the call; in check mode ``after`` is
    foretold. ``failed`` says that it is not as it should be, and ``msg`` why and what to do next."""

    before: State | None
    after: State | None
    changed: bool = False
    failed: bool = False
    msg: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "cordoned": self.after.cordoned if self.after else None,
            "ours": self.after.ours if self.after else False,
            "before": asdict(self.before) if self.before else None,
            "changed": self.changed,
            "failed": self.failed,
            "msg": self.msg,
        }


class Scheduler(ABC):
    """Who places work on nodes. One node's trouble is in its own result; :class:`SchedulerError` is for all of them.

    A node that was out of service before us is foreign: it is neither marked nor, later, put back into service.
    Both calls can be repeated: they finish what an interrupted one has begun.
    """

    @abstractmethod
    def cordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        """Take ``nodes`` out of service for new work, leaving ``mark``; with ``check``, only say what would change."""

    @abstractmethod
    def uncordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        """Put those of ``nodes`` back into service that this collection took out, under whatever run id."""
