# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan as lines of text that a person can read and approve.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .forecast import Forecast
from .plan import Plan

_NAMES_SHOWN = 6


def lines(plan: Plan) -> list[str]:
    """The plan: one line a batch, then the nodes left out by reason, then the notes."""
    hours = plan.total_lost / 3600
    out = [
        f"plan {plan.id}: driver {plan.version}, {len(plan.order)} nodes in {len(plan.batches)} batches, "
        f"about {_span(plan.finish)}, {hours:.1f} GPU-hours of work lost"
    ]
    head = ("batch", "starts", "nodes", "move", "wait", "cold", "names")
    rows = []
    for batch in plan.batches:
        fates = Counter(fate.fate for fate in batch.fates)
        counts = [str(fates[what] or "-") for what in ("move", "wait", "cold_start")]
        rows.append((batch.name, _span(batch.starts), str(len(batch.nodes)), *counts, _shortened(batch.nodes)))
    out.extend(columns([head, *rows]) if rows else ["nothing to upgrade"])
    reasons: dict[str, list[str]] = {}
    for name, reason in (*plan.skipped, *plan.blocked):
        reasons.setdefault(reason, []).append(name)
    out.extend(f"left out: {len(names)} ({reason}): {_shortened(names)}" for reason, names in reasons.items())
    out.extend(f"note: {note}" for note in plan.notes)
    return out


def beside(forecasts: Sequence[Forecast]) -> list[str]:
    """Forecasts side by side, one line a way of upgrading."""
    head = ("way", "lost GPU-hours", "(10%..90%)", "moves", "cold starts", "waits", "finish", "(10%..90%)")
    rows = []
    for each in forecasts:
        told = each.as_dict()
        low, dummy, high = told["lost_gpu_hours_spread"]
        soon, dummy, late = told["finish_seconds_spread"]
        counts = [f"{told[what]:g}" for what in ("moves", "cold_starts", "waits")]
        rows.append(
            (
                each.way,
                f"{told['lost_gpu_hours']:.1f}",
                f"{low:.1f}..{high:.1f}",
                *counts,
                _span(told["finish_seconds"]),
                f"{_span(soon)}..{_span(late)}",
            )
        )
    return columns([head, *rows])


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}" if minutes >= 60 else f"{minutes}m"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown
