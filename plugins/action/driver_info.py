# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action behind every module of this collection that needs a connection (routed here by meta/runtime.yml).

Ansible drops an unreachable host from the play: ``rescue`` never runs for it, and neither ``max_fail_percentage`` nor
``any_errors_fatal`` keeps the next batch from starting. A node lost in the middle of an upgrade must instead be a
failed node, so that it is rescued, counted and reported. Where a task is delegated, to where the scheduler is asked,
Ansible drops the host it was for: a node that is well, or localhost, and with it the report. Nothing else is changed
about running the module.
"""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

_ANSWERED = ("Failed to create temporary directory", "No space left on device")
"""What only a node that answers can have said."""


class ActionModule(ActionBase):
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        variables = task_vars or {}
        result: dict[str, Any] = super().run(None, variables)
        try:
            result.update(self.act(variables))
        except AnsibleConnectionFailure as exc:
            node = self._task.delegate_to or variables.get("inventory_hostname", "the node")
            # Ansible takes it for a lost connection if its directory for temporary files cannot be made
            answered = any(sign in str(exc) for sign in _ANSWERED)
            seen = "answers, but takes no files" if answered else "does not answer"
            result.update(failed=True, lost=not answered, msg=f"{node} {seen} ({self._task.action}): {_cause(exc)}")
        else:
            self._remove_tmp_path(self._connection._shell.tmpdir)
        return result

    def act(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Run the module.

        :raises AnsibleConnectionFailure: if the node does not answer.
        """
        result: dict[str, Any] = self._execute_module(task_vars=variables, wrap_async=self._task.async_val)
        return result


def _cause(error: AnsibleConnectionFailure) -> str:
    """What ssh said, without Ansible's advice around it; that ends with nothing if a connection broke in mid-flight."""
    before, advice, said = str(error).partition("reached over ssh:")
    return (said.strip() or "the connection broke") if advice else before.strip()
