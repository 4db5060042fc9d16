# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan as lines of text that a person can read and approve.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .plan import Plan

_NAMES_SHOWN = 6


def lines(plan: Plan) -> list[str]:
    """The plan: one line a batch, then the nodes left out by reason, then the notes."""
    out = [f"plan {plan.id}: driver {plan.version}, {len(plan.order)} nodes in {len(plan.batches)} batches"]
    rows = [(batch.name, str(len(batch.nodes)), _shortened(batch.nodes)) for batch in plan.batches]
    out.extend(columns([("batch", "nodes", "names"), *rows]) if rows else ["nothing to upgrade"])
    for reason, number in sorted(Counter(reason for _, reason in plan.skipped).items()):
        names = [name for name, why in plan.skipped if why == reason]
        out.append(f"left out: {number} ({reason}): {_shortened(names)}")
    out.extend(f"note: {note}" for note in plan.notes)
    return out


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown
