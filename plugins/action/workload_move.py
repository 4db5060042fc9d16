# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conduct moves between nodes: the modules about saves, called on both ends in the right order.

The order itself is module_utils/checkpointers/moving.py; here are the two connections and what a person sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.utils.display import Display

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import moving
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import compatibility
from ansible_collections.gpufleet.driver.plugins.plugin_utils import nodes

_ALL = ("store", "state_dir", "criu")
_FETCH = "checkpoint_fetch"
_DECLARED = ("name", "unit", "container", "engine", "ready", "ready_timeout", "save")
_GUESTS = ("running", "leaving", "left")


class ActionModule(nodes.NodesAction):
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        variables = task_vars or {}
        result: dict[str, Any] = super().run(None, variables)
        args = self.validate_argument_spec(ARGUMENTS)[1]
        workloads = [_about_saving(one) for one in args["workloads"] if one.get("save")]
        every = self.nodes(variables)
        node = every.own
        here = {"options": {key: args[key] for key in _ALL if args[key] is not None}}
        terms = moving.Terms(
            shared=args["shared"],
            patience=float(args["patience"]),
            gang=args["gang"],
            capture={
                "node": node,
                "lock_timeout": args["lock_timeout"],
                "freeze_limit": args["freeze_limit"],
                "concurrency": args["concurrency"],
            },
            restore={
                "settle": args["settle"],
                "freeze_limit": args["freeze_limit"],
                "waived": args["waived"],
                "concurrency": args["concurrency"],
            },
            **here,
        )

        def call(name: str, module: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
            try:
                return every.fetch(name, options) if module == _FETCH else every.module(name, module, options)
            except AnsibleConnectionFailure as exc:
                raise moving.NodeLost(str(exc)) from exc
            except AnsibleError as exc:
                return {"failed": True, "msg": str(exc)}

        move = moving.Move(node, call, terms, _differences(args["waived"]), lambda text: Display().display(f"  {text}"))
        try:
            look = self._play_context.check_mode
            if args["state"] == "away":
                outcomes = (move.foretell if look else move.away)(workloads, args["candidates"])
            else:
                told = call(node, "checkpoint_info", terms.options)
                restored = [one for one in told.get("restored") or () if not one.get("own")]
                guests = [one for one in restored if one.get("state") in _GUESTS]
                outcomes = move.back([one for one in guests if one["home"] in args["candidates"]], look)
                gone = {one.workload for one in outcomes if one.how not in (moving.STAYED, moving.COLD)}
                result["guests"] = [
                    {**one["declared"], "name": one["workload"]} for one in guests if one["workload"] not in gone
                ]
        except moving.NodeLost as exc:
            return {**result, "failed": True, "lost": True, "msg": f"{node} stopped answering: {exc}"}
        return {**result, **judged(outcomes, args["unsaved"])}


def _about_saving(declared: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a declaration that the modules about saves take."""
    return {key: declared[key] for key in _DECLARED if key in declared}


def _differences(waived: list[str]) -> moving.Differences:
    def tupled(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    return lambda own, offer: compatibility.explain(tupled(own), tupled(offer), waived=waived, scope=compatibility.NODE)


def judged(outcomes: list[moving.Outcome], unsaved: str) -> dict[str, Any]:
    """The result of the task: it fails if work may run twice or nowhere, or was to be saved at any price and is not."""
    unknown = [one for one in outcomes if one.how == moving.UNKNOWN]
    lost = [one for one in outcomes if one.how == moving.LOST]
    refused = [one for one in outcomes if one.how in (moving.STAYED, moving.COLD)] if unsaved == "refuse" else []
    result: dict[str, Any] = {
        "changed": any(one.how not in (moving.STAYED, moving.ABSENT) for one in outcomes),
        "workloads": [one.as_dict() for one in outcomes],
        "moved": {one.workload: one.to for one in outcomes if one.how == moving.MOVED},
    }
    said = [f"{one.workload} may run on {one.to or 'another node'}: {_last(one)}" for one in unknown]
    said += [f"{one.workload} does not run, {_saved(one)}: {_last(one)}" for one in lost]
    said += [f"{one.workload} is not saved: {_last(one)}" for one in refused if one not in lost]
    return {**result, "failed": True, "msg": "; ".join(said)} if said else result


def _saved(outcome: moving.Outcome) -> str:
    return f"and is to be moved again from its save {outcome.kept}" if outcome.kept else "nor is it saved"


def _last(outcome: moving.Outcome) -> str:
    if not outcome.reasons:
        return "no reason is known"
    one = outcome.reasons[-1]
    return f"{one['reason']} at {one['step']}: {one['observed']}, expected {one['expected']}; next: {one['next']}"


ARGUMENTS: dict[str, Any] = {
    "state": {"type": "str", "choices": ["away", "home"], "default": "away"},
    "workloads": {"type": "list", "elements": "dict", "default": []},
    "candidates": {"type": "list", "elements": "str", "default": []},
    "shared": {"type": "bool", "default": False},
    "gang": {"type": "bool", "default": False},
    "unsaved": {"type": "str", "choices": ["stop", "refuse"], "default": "stop"},
    "waived": {"type": "list", "elements": "str", "default": []},
    "patience": {"type": "int", "default": 300},
    "settle": {"type": "int", "default": 10},
    "concurrency": {"type": "int", "default": 4},
    **nodes.SAVING,
}
