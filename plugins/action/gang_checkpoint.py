# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Save the members of a gang on several nodes, all or none: workload_checkpoint on each, over its own connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.utils.display import Display

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import gang
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.moving import NodeLost
from ansible_collections.gpufleet.driver.plugins.plugin_utils.nodes import SAVING, NodesAction

ARGUMENTS: dict[str, Any] = {
    "members": {
        "type": "list",
        "elements": "dict",
        "required": True,
        "options": {
            "node": {"type": "str", "required": True},
            "workload": {"type": "dict", "required": True},
        },
    },
    **SAVING,
}


class ActionModule(NodesAction):
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        variables = task_vars or {}
        result: dict[str, Any] = super().run(None, variables)
        args = self.validate_argument_spec(ARGUMENTS)[1]
        members = [gang.Member(one["node"], one["workload"]) for one in args.pop("members")]
        unnamed = [one.node for one in members if not one.workload.get("name")]
        if unnamed:
            return {**result, "failed": True, "msg": f"a workload of {unnamed[0]} has no name"}
        if len({one.name for one in members}) < len(members):
            return {**result, "failed": True, "msg": "two members have the same name; each needs one of its own"}
        every = self.nodes(variables)

        def call(name: str, options: Mapping[str, Any], only_look: bool) -> Mapping[str, Any]:
            held, self._task.check_mode = self._task.check_mode, only_look
            context, self._play_context.check_mode = self._play_context.check_mode, only_look
            try:
                return every.module(name, "workload_checkpoint", options)
            except AnsibleConnectionFailure as exc:
                raise NodeLost(str(exc)) from exc
            except AnsibleError as exc:
                return {"failed": True, "msg": str(exc)}
            finally:
                self._task.check_mode, self._play_context.check_mode = held, context

        done = gang.capture(members, call, args, lambda text: Display().display(f"  {text}"), self._task.check_mode)
        whole = all(one["ok"] for one in done)
        answer = {**result, "changed": any(one.get("changed") for one in done), "workloads": done}
        return answer if whole else {**answer, "failed": True, "msg": "; ".join(_said(done))}


def _said(done: list[dict[str, Any]]) -> list[str]:
    return [str(one["msg"]) for one in sorted(done, key=lambda one: one.get("reason") is None)]
