# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person watching an upgrade sees: :class:`Progress` makes lines of what happens, the callback prints them."""

from __future__ import annotations

DOCUMENTATION = r"""
name: progress
type: stdout
author: gpufleet.driver contributors (@gpufleet)
version_added: 1.0.0
short_description: A few lines for each batch of an upgrade instead of a line for each task and host
description:
  - Shows the plays, the batches, what is done in each and how long it took, what is waited for, every failure with its
    reason, what became of each node, and the plan and the table of the report. Begins each line with the time since
    the start.
  - For the playbooks of this collection. Others show their plays, their failures and what they print.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ansible import constants as C
from ansible.plugins.callback import CallbackBase

from ansible_collections.gpufleet.driver.plugins.module_utils.account import lasted, named

PHASES = {
    "preflight": "look",
    "stage": "download",
    "cordon": "cordon",
    "evacuate": "evacuate",
    "install": "install",
    "validate": "validate",
    "rollback": "roll back",
    "uncordon": "give back",
}
SHOWN_STEPS = ("install", "rollback")
"""Roles whose single steps are shown: those that keep a node out of service."""
GROUPED_LATER = "Look at every node"
"""The play whose failures are told later, for all nodes together; or at the end, if no other play comes."""
QUIET = ("set_fact", "assert", "meta", "validate_argument_spec", "include_tasks", "include_role", "debug")
"""Actions that do nothing worth a line."""
GOOD = "good"
BAD = "bad"
_QUICK = 1.0

Line = tuple[str, str]
"""A line of text, and ``good``, ``bad`` or nothing."""


class Progress:
    """Told what happens, each method gives the lines to show. Times are Unix seconds."""

    def __init__(self, now: float) -> None:
        self.began = now
        self.play_name: str | None = None
        self.current = ""
        self.phase: str | None = None
        self.batches: Sequence[Mapping[str, Any]] = ()
        self.seen: dict[str, int] = {}
        self.started: dict[str, float] = {}
        self.spent: dict[str, float] = {}
        self.failures: dict[str, int] = {}
        self.step: tuple[str, float] | None = None
        self.plays = 0
        self.untold: dict[str, list[str]] = {}

    def play(self, name: str, now: float) -> list[Line]:
        lines = self._ended(now) + self._close(now)
        self.play_name = self.current = name
        self.plays += 1
        self.untold = {}
        return lines

    def nobody(self) -> list[Line]:
        """No host matches the play. Later ones may have none: those that go by what was found."""
        return [("no host matches: see -i and -e gpu_hosts", BAD)] if self.plays == 1 else []

    def task(self, name: str, role: str | None, action: str, now: float) -> list[Line]:
        """A task begins on all hosts of the batch."""
        quiet = action in QUIET
        lines = self._ended(now)
        if role != self.phase and not (quiet and role is None):
            lines += self._close(now)
            self.phase = role if role in PHASES else None
            if self.phase in SHOWN_STEPS:
                lines.append(self._line(f"  {PHASES[self.phase]} …", now))
        self.step = (name, now) if self.phase in SHOWN_STEPS and not quiet else None
        if action == "wait_for":
            lines.append(self._line(f"  {name[:1].lower()}{name[1:]} …", now))
        return lines

    def _ended(self, now: float) -> list[Line]:
        """The line of a step that is over, if it took a while."""
        (name, began), self.step = self.step or ("", now), None
        if now - began < _QUICK:
            return []
        return [self._line(f"    {name[:1].lower()}{name[1:]}  {lasted(now - began)}", now)]

    def host(self, name: str, now: float) -> list[Line]:
        """A host begins the task."""
        self.started[name] = now
        if self.play_name is None:
            return []
        play, self.play_name = self.play_name, None
        self.seen[play] = self.seen.get(play, 0) + 1
        for number, batch in enumerate(self.batches, 1):
            if play.startswith("Upgrade") and name in batch["nodes"]:
                title = f"{batch['name']} ({number} of {len(self.batches)}): {named(batch['nodes'], 8)}"
                return [("", ""), self._line(title, now)]
        more = f" ({self.seen[play]})" if self.seen[play] > 1 else ""
        return [("", ""), self._line(play + more, now)]

    def done(self, host: str, action: str, result: Mapping[str, Any], now: float) -> list[Line]:
        """A host has done the task."""
        self._stop(host, now)
        if action == "debug":
            said = result.get("msg", "")
            return [(f"       {line}", "") for line in (said if isinstance(said, list) else str(said).splitlines())]
        facts = result.get("ansible_facts") or {}
        if action == "set_fact" and isinstance(facts.get("gpu_plan"), Mapping):
            self.batches = facts["gpu_plan"].get("batches", ())
        outcome = facts.get("gpu_outcome")
        if action == "set_fact" and isinstance(outcome, Mapping) and outcome.get("name") not in (None, "lost"):
            name = str(outcome["name"]).replace("_", " ")
            mood = GOOD if name == "upgraded" else BAD if name in ("quarantined", "refused") else ""
            return [self._line(f"    {host} {name}", now, mood)]
        return []

    def failed(self, host: str, task: str, result: Mapping[str, Any], now: float) -> list[Line]:
        self._stop(host, now)
        self.step = None
        of_items = [item.get("msg") for item in result.get("results", ()) if item.get("failed")]
        text = "; ".join(str(one) for one in of_items or [result.get("msg")] if one) or "no message"
        if self.current == GROUPED_LATER:
            self.failures[host] = self.failures.get(host, 0) + 1
            self.untold.setdefault(text, []).append(host)
            return []
        first, *rest = text.splitlines()
        return [
            self._line(f"    {host} failed: {task}: {first}", now, BAD),
            *((f"       {line}", BAD) for line in rest),
        ]

    def waits(self, host: str, task: str, result: Mapping[str, Any], now: float) -> list[Line]:
        """A host will try the task again."""
        nodes = result.get("nodes")
        waiting = {
            str(node): one["waiting"]
            for node, one in (nodes.items() if isinstance(nodes, Mapping) else ())
            if isinstance(one, Mapping) and one.get("waiting")
        }
        if not waiting:
            return [self._line(f"    {host} waits: {result.get('msg') or task}", now)]
        told = {node: f": {what}" if isinstance(what, str) else f" for {named(what)}" for node, what in waiting.items()}
        return [self._line(f"    {node} waits{what}", now) for node, what in told.items()]

    def end(self, now: float) -> list[Line]:
        return [
            *self._ended(now),
            *self._close(now),
            *(self._line(f"  {named(hosts)}: {text}", now, BAD) for text, hosts in self.untold.items()),
            ("", ""),
            self._line(f"ended after {lasted(now - self.began)}", now),
        ]

    def _stop(self, host: str, now: float) -> None:
        self.spent[host] = self.spent.get(host, 0.0) + now - self.started.pop(host, now)

    def _close(self, now: float) -> list[Line]:
        """The line of a phase that is over."""
        phase, spent, failures = self.phase, self.spent, self.failures
        self.phase, self.spent, self.failures = None, {}, {}
        longest = max(spent.values(), default=0.0)
        if phase is None or longest < _QUICK:
            return []
        if len(spent) <= 4:
            who = ", ".join(f"{host} {lasted(seconds)}" for host, seconds in spent.items())
        else:
            who = f"{len(spent)} nodes, {lasted(min(spent.values()))} to {lasted(longest)}"
        bad = f"; not fit: {named(sorted(failures))}" if failures else ""
        return [self._line(f"  {PHASES[phase]:<10} {who}{bad}", now, BAD if bad else "")]

    def _line(self, text: str, now: float, mood: str = "") -> Line:
        seconds = int(now - self.began)
        return f"{seconds // 60:3d}:{seconds % 60:02d} {text}", mood


def plain(text: str) -> str:
    """A line without what would steer a terminal: some of it was written by whoever runs work on a node."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "gpufleet.driver.progress"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.progress = Progress(time.time())

    def _show(self, lines: Sequence[Line]) -> None:
        colours = {GOOD: C.COLOR_OK, BAD: C.COLOR_ERROR}
        for text, mood in lines:
            self._display.display(plain(text), color=colours.get(mood))

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._show(self.progress.play(play.get_name().strip(), time.time()))

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        role = task._role.get_name().rpartition(".")[2] if task._role else None
        self._show(self.progress.task(task.get_name().rpartition(" : ")[2], role, _short(task.action), time.time()))

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self.v2_playbook_on_task_start(task, False)

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._show(self.progress.host(host.get_name(), time.time()))

    def v2_runner_on_ok(self, result: Any) -> None:
        self._handle_warnings(result._result)
        host, action = result._host.get_name(), _short(result._task.action)
        self._show(self.progress.done(host, action, result._result, time.time()))

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._handle_warnings(result._result)
        self._show(self.progress.done(result._host.get_name(), "", {}, time.time()))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._handle_warnings(result._result)
        host = result._host.get_name()
        if ignore_errors:
            self._show(self.progress.done(host, "", {}, time.time()))
        else:
            self._show(self.progress.failed(host, result._task.name or "", result._result, time.time()))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self.v2_runner_on_failed(result)

    def v2_runner_retry(self, result: Any) -> None:
        host = result._host.get_name()
        self._show(self.progress.waits(host, result._task.name or "", result._result, time.time()))

    def v2_playbook_on_no_hosts_matched(self) -> None:
        self._show(self.progress.nobody())

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._show(self.progress.end(time.time()))


def _short(action: str) -> str:
    return action.rpartition(".")[2]
