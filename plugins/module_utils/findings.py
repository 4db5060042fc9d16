# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a check found, in the one shape that preflight, validation and the report all speak.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """One check: ``check`` is a stable dotted id, ``level`` is ok, warning or error.

    ``message`` names what was seen and what was expected; ``next`` is the command or act a person would do now.
    """

    check: str
    level: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    next: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == ERROR]


def summary(findings: Iterable[Finding]) -> str:
    """Every error in one sentence each, with what to do next; empty when there is none."""
    return "; ".join(
        f"{finding.check}: {finding.message}" + (f" (next: {finding.next})" if finding.next else "")
        for finding in errors(findings)
    )
