# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the operator decides about an upgrade: sizes of batches, limits, windows. Pure: time is an argument.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from math import inf
from typing import Any, Union
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

Size = Union[int, str]
"""A number of nodes, or a percentage of the nodes that will be upgraded such as ``25%``."""


KEPT_TOGETHER = ("nvlink", "imex")
"""Kinds of domain that are not split between two drivers unless that is allowed."""


class BadPolicy(ValueError):
    """A policy that contradicts itself or the fleet; the text says what and what to change."""


DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FULL_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


@dataclass(frozen=True)
class Window:
    """A maintenance window: from ``start`` to ``end`` (HH:MM in ``tz``, past midnight if ``end`` is not later)."""

    start: str
    end: str
    tz: str = "UTC"
    days: tuple[str, ...] = DAYS

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Window:
        """:raises BadPolicy: if a time, a day or the time zone is none."""
        known = {"start", "end", "tz", "days"}
        if set(given) - known or not {"start", "end"} <= set(given):
            raise BadPolicy(f"window {dict(given)!r} needs start and end, and may have tz and days")
        window = cls(str(given["start"]), str(given["end"]), str(given.get("tz") or "UTC"), _days(given.get("days")))
        for text in (window.start, window.end):
            if not re.fullmatch(r"([01][0-9]|2[0-3]):[0-5][0-9]", text):
                raise BadPolicy(f"window time {text!r} is not HH:MM; in YAML it has to be in quotes")
        try:
            ZoneInfo(window.tz)
        except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
            raise BadPolicy(f"window time zone {window.tz!r} is unknown here") from exc
        return window

    def next_start(self, after: float, duration: float) -> tuple[float, float] | None:
        """The first moment from ``after`` at which ``duration`` seconds fit, within two weeks, and when the window
        closes then. Moments are in Unix seconds."""
        zone = ZoneInfo(self.tz)
        day = datetime.fromtimestamp(after, zone).date() - timedelta(days=1)
        for dummy in range(16):
            if DAYS[day.weekday()] in self.days:
                opens = datetime.combine(day, _clock(self.start), zone).timestamp()
                last_day = day if self.end > self.start else day + timedelta(days=1)
                ends = datetime.combine(last_day, _clock(self.end), zone)
                # a time that the clock skips or shows twice: the earlier reading, so that nothing runs past it
                closes = min(ends.timestamp(), ends.replace(fold=1).timestamp())
                start = max(after, opens)
                if start + duration <= closes:
                    return start, closes
            day += timedelta(days=1)
        return None


def _days(given: Any) -> tuple[str, ...]:
    """Days as a list or as text separated by commas, in full or by three letters; None is every day."""
    if given is None:
        return DAYS
    words = given.split(",") if isinstance(given, str) else given if isinstance(given, (list, tuple)) else [given]
    days = [str(word).strip().lower() for word in words]
    for day in days:
        if day not in DAYS and day not in _FULL_DAYS:
            raise BadPolicy(f"window day {day!r} is none of {', '.join(DAYS)}")
    if not days:
        raise BadPolicy("window days is an empty list: leave it out for every day")
    return tuple(day[:3] for day in days)


def _clock(text: str) -> time:
    return time(int(text[:2]), int(text[3:]))


@dataclass(frozen=True)
class Policy:
    """How to upgrade. Times are in seconds; ``now`` is the Unix time at which the upgrade would start.

    ``canary`` is a number of nodes of each GPU model, or names. ``batch_size`` is one size or several; the last one
    repeats, as in Ansible's ``serial``. ``growth`` multiplies the size after each batch. ``keep_together`` names the
    domain kinds whose nodes are upgraded in one batch; ``max_per_domain`` limits nodes of one domain in a batch.
    ``reserve`` names nodes to be upgraded last. ``max_wait`` is how long a batch may wait for work to end.
    ``max_pending`` bounds, by GPU model, the GPUs that queued work lacks while a batch is down. ``waive`` names
    compatibility fields not to be compared. ``gpu_models`` limits the upgrade to these models; ``unsupported`` names
    models that the version does not support.
    """

    version: str
    canary: int | tuple[str, ...] = 1
    batch_size: tuple[Size, ...] = ("20%",)
    growth: float = 1.0
    max_unavailable: Size | None = None
    keep_together: tuple[str, ...] = KEPT_TOGETHER
    max_per_domain: tuple[tuple[str, int], ...] = ()
    reserve: tuple[str, ...] = ()
    max_wait: float = 7200.0
    max_pending: tuple[tuple[str, float], ...] = ()
    windows: tuple[Window, ...] = ()
    now: float | None = None
    waive: tuple[str, ...] = ()
    gpu_models: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()

    def opening(self, after: float, duration: float) -> tuple[float, float]:
        """The first moment from ``after`` on (seconds from now) at which something of ``duration`` fits a window, and
        how much longer than that it may take.

        :raises BadPolicy: if no window of the coming two weeks is long enough.
        """
        found = self.fits(after, duration)
        if found is None:
            raise BadPolicy(
                f"a batch takes {duration / 60:.0f} minutes and fits no maintenance window: "
                "lengthen the window or make batches quicker"
            )
        return found

    def fits(self, after: float, duration: float) -> tuple[float, float] | None:
        """:meth:`opening`, or None if no window of the coming two weeks is long enough."""
        if not self.windows or self.now is None:
            return after, inf
        found = next_window(self.windows, self.now + after, duration)
        return None if found is None else (found[0] - self.now, found[1] - found[0] - duration)


def next_window(windows: Sequence[Window], after: float, duration: float) -> tuple[float, float] | None:
    """Of all ``windows``, :meth:`Window.next_start` of the one that has room first, and longest."""
    found = [moment for window in windows if (moment := window.next_start(after, duration)) is not None]
    return min(found, key=lambda moment: (moment[0], -moment[1]), default=None)


def count(size: Size, total: int, what: str) -> int:
    """Nodes that ``size`` means out of ``total``: a percentage is rounded down, but never to nothing.

    :raises BadPolicy: if it is neither a positive number nor a percentage between 1 % and 100 %.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    text = str(size).strip()
    if whole(text):
        return int(text)
    found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]+)?)\s?%", text)
    if found and 0 < float(found.group(1)) <= 100:
        return max(1, int(total * float(found.group(1)) / 100))
    raise BadPolicy(f"{what} {size!r} is neither a number of nodes of 1 or more nor a percentage such as 25%")


def whole(text: str) -> int | None:
    """The whole number of 0 or more that is written as ASCII digits, or None."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def most_down(policy: Policy, total: int, unavailable: int) -> int:
    """Nodes out of ``total`` that may be taken down at once.

    ``unavailable`` nodes are out of service before the upgrade begins and use up ``max_unavailable``.

    :raises BadPolicy: if no node may be taken down.
    """
    if policy.max_unavailable is None:
        return total
    allowed = count(policy.max_unavailable, total, "max_unavailable")
    if allowed <= unavailable:
        raise BadPolicy(
            f"max_unavailable allows {allowed} nodes down and {unavailable} are already out of service: "
            "return some of them to service, or raise max_unavailable"
        )
    return allowed - unavailable


def batch_limits(policy: Policy, total: int, unavailable: int) -> Sequence[int]:
    """The largest size of each batch after the canary; the last one repeats.

    :raises BadPolicy: if no node may be taken down, or a size is none.
    """
    most = most_down(policy, total, unavailable)
    sizes = [count(size, total, "batch_size") for size in policy.batch_size]
    if not sizes:
        raise BadPolicy("batch_size is an empty list")
    if not 1 <= policy.growth < inf:
        raise BadPolicy(f"growth {policy.growth} is not a number of 1 or more, by which batches could grow")
    if policy.growth > 1:
        grown = float(sizes[-1])
        while grown < most and len(sizes) < total:
            grown *= policy.growth
            sizes.append(int(min(grown, most)))
    return [min(size, most) for size in sizes]


def canary_of(value: Any) -> int | tuple[str, ...]:
    """The ``canary`` option: a number of nodes, one name or several separated by commas, or a list of names.

    :raises BadPolicy: for anything else.
    """
    if isinstance(value, str):
        value = value.strip()
        if whole(value) is not None:
            return int(value)
        if not value:
            raise BadPolicy("canary is an empty text: give 0 for none")
        return tuple(name.strip() for name in value.split(",") if name.strip())
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(str(name) for name in value)
    raise BadPolicy(f"canary {value!r} is neither a number of nodes nor names of nodes")
