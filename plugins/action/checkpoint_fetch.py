# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bring an artefact from one node to another through the controller, which is the only one that reaches both.

The controller holds a few pieces at a time and never the whole. The module on the receiving node says which pieces are
still missing, so a broken transfer goes on where it stopped.
"""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact
from ansible_collections.gpufleet.driver.plugins.plugin_utils.nodes import NodesAction


class ActionModule(NodesAction):
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        variables = task_vars or {}
        result: dict[str, Any] = super().run(None, variables)
        args = {"store": "/var/lib/gpufleet/store", **self._task.args}
        every = self.nodes(variables)
        node = every.own
        missing = [key for key in ("artefact", "source") if not args.get(key)]
        if missing:
            return {**result, "failed": True, "msg": f"missing required arguments: {', '.join(missing)}"}
        try:
            return {**result, **every.fetch(node, args)}
        except AnsibleConnectionFailure as exc:
            return {
                **result,
                "failed": True,
                "lost": True,
                "msg": f"{args['artefact']} did not reach {node}: {exc}",
            }
        except (AnsibleError, artefact.ArtefactError) as exc:
            return {**result, "failed": True, "msg": f"{args['artefact']} did not reach {node}: {exc}"}
