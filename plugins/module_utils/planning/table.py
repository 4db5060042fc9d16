# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan, and forecasts beside it, as lines of text that a person can read and approve.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from ..account import lasted, named
from .forecast import CAUSES, Forecast
from .plan import Batch, Plan
from .policy import DAYS

_NAMES_SHOWN, _REASONS_SHOWN = 6, 12
_NUMBER = re.compile(r"[0-9.]+")
_FORESEEABLE = 1e9
"""Seconds from the start beyond which no date is told."""
_CAUSES = {"moves": "paused by moves", "cold_starts": "cold starts", "no_room": "no room", "idle": "idle GPUs"}
_WAYS = {
    "operator": "list order, some at a time, work evicted without saving it",
    "drain_and_wait": "list order, some at a time, closed until empty, evicted after the deadline",
    "all_at_once": "every node at the same time, work evicted without saving it",
}
_UNBOUND = "the plan keeps to the maintenance windows; the other ways know none and start at once: compare losses only"


def lines(plan: Plan, start: datetime | None = None) -> list[str]:
    """The plan: what it does and loses, one line a batch, the nodes left out by reason, and the notes.

    :param start: when the upgrade starts, with the time zone in which dates are shown; None shows none.
    """
    count = len(plan.order)
    start = start if plan.finish < _FORESEEABLE else None
    out = [f"plan {plan.id}: driver {plan.version} for {_of(count, 'node')} in {_of(len(plan.batches), 'batch')}"]
    if not count:
        out.append("nothing to upgrade")
    else:
        takes, loses = lasted(60 * round(plan.finish / 60)), _hours(plan.total_lost, plan.lost or {})
        out.append(f"takes {takes}, loses {loses}, if all lasts as expected")
        clock = (f"in {start.tzinfo}",) if start else ()
        head = ("batch", "begins", "ends", *clock, "nodes", "stay", "wait", "move", "cold", "names of the nodes")
        rows = []
        for batch in plan.batches:
            fates = Counter(fate.fate for fate in batch.fates)
            rows.append(
                (
                    batch.name,
                    _clock(batch.starts),
                    _clock(batch.ends),
                    *((_on_the_clock(batch, start),) if start else ()),
                    str(len(batch.nodes)),
                    *(str(fates[fate] or "-") for fate in ("stay", "wait", "move", "cold_start")),
                    named(batch.nodes, _NAMES_SHOWN),
                )
            )
        out += ["", *columns([head, *rows])]
        if any(batch.fates for batch in plan.batches):
            out += [
                "times are hours:minutes from the start; workloads that stay end before the turn of their node,",
                "those that wait end while their batch waits, those that move pause, cold ones start again",
            ]
    for title, left in (("left out", plan.skipped), ("cannot be emptied", plan.blocked)):
        out += [f"{title}: {text}" for text in _by_reason(left)]
    return [_printable(line) for line in [*out, *(f"note: {note}" for note in plan.notes)]]


def impossible(plan: Plan) -> list[str]:
    """Why no node can be upgraded, a line a reason."""
    told = [f"  {_printable(text)}" for text in _by_reason(plan.blocked)]
    return [f"No node can be upgraded to {plan.version}:", *told]


def beside(forecasts: Sequence[Forecast], windows: bool = False) -> list[str]:
    """Forecasts side by side, one line a way of upgrading; ``windows`` says that the plan keeps to such."""
    told = [each.as_dict() for each in forecasts]
    head = ("forecast", "GPU-hours lost", "10%..90%", *_CAUSES.values(), "starts", "takes", "10%..90%")
    rows = []
    for each in told:
        low, dummy, high = each["lost_gpu_hours_spread"]
        soon, dummy, late = each["finish_seconds_spread"]
        rows.append(
            (
                each["way"],
                f"{each['lost_gpu_hours']:.1f}",
                f"{low:.1f}..{high:.1f}",
                *(f"{each['lost_by_cause'][cause]:.1f}" for cause in CAUSES),
                f"{each['cold_starts']:g}",
                _clock(each["finish_seconds"]),
                f"{_clock(soon)}..{_clock(late)}",
            )
        )
    ours, *others = told
    return [
        *columns([head, *rows]),
        f"means of {_of(len(forecasts[0].runs), 'run')} in which work ends and swaps last as chance has it;",
        f"the swaps themselves keep GPUs from work for {ours['swap_gpu_hours']:.1f} GPU-hours more, whichever way",
        *(f"{each['way']}: {_WAYS[each['way']]}{_compared(ours, each)}" for each in others),
        *([_UNBOUND] if windows and others else []),
    ]


def _compared(ours: Mapping[str, float], other: Mapping[str, float]) -> str:
    if not other["lost_gpu_hours"]:
        return ""
    return f"; the plan loses {ours['lost_gpu_hours'] / other['lost_gpu_hours']:.0%} of that"


def _hours(total: float, causes: Mapping[str, float]) -> str:
    """GPU-seconds as ``5.1 GPU-hours of work (4.0 cold starts, 1.1 idle GPUs)``."""
    parts = ", ".join(f"{causes[cause] / 3600:.1f} {_CAUSES[cause]}" for cause in _CAUSES if causes.get(cause))
    return f"{total / 3600:.1f} GPU-hours of work" + (f" ({parts})" if parts else "")


def _printable(text: str) -> str:
    """Without characters that would move a terminal's cursor: names come from schedulers and their users."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _on_the_clock(batch: Batch, start: datetime) -> str:
    """``Sat 2026-03-07 22:00-22:11``; the day of the end as well if it is another."""
    minute = start.timestamp() // 60
    begin, end = (
        datetime.fromtimestamp(60 * (minute + round(each / 60)), start.tzinfo) for each in (batch.starts, batch.ends)
    )
    return f"{_day(begin)} {begin:%H:%M}-{_day(end) + ' ' if end.date() > begin.date() else ''}{end:%H:%M}"


def _day(moment: datetime) -> str:
    return f"{DAYS[moment.weekday()].title()} {moment:%Y-%m-%d}"


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}"


def _of(count: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{count} {what}{'' if count == 1 else plural}"


def _by_reason(left: Iterable[tuple[str, str]]) -> list[str]:
    """``gpu-1, gpu-2: already on 580.95.05``, the names of one reason together; if many, also those of reasons
    that differ only in their first word, the name of a workload, and in numbers."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left:
        reasons.setdefault(reason, []).append(name)
    told = [f"{named(names, _NAMES_SHOWN)}: {reason}" for reason, names in reasons.items()]
    if len(told) <= _REASONS_SHOWN:
        return told
    alike: dict[str, dict[str, list[str]]] = {}
    for reason, names in reasons.items():
        alike.setdefault(_NUMBER.sub("", reason.partition(" ")[2]), {})[reason] = names
    groups = sorted(alike.values(), key=lambda group: -sum(map(len, group.values())))
    told = []
    for group in groups[:_REASONS_SHOWN]:
        names = [name for each in group.values() for name in each]
        example = f"for example of {names[0]}: " if len(group) > 1 else ""
        told.append(f"{named(names, _NAMES_SHOWN)}: {example}{next(iter(group))}")
    more = sum(len(names) for group in groups[_REASONS_SHOWN:] for names in group.values())
    return [*told, *([f"{more} more, for other reasons: see the plan's JSON"] if more else [])]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
