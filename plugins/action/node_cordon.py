# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action behind the modules that decide, or ask a scheduler (routed here by meta/runtime.yml).

On the controller they are called within Ansible: to pack a module, start Python and compile the module anew takes ten
times as long as what they do, and each batch has half a dozen of them. Elsewhere, or as somebody else, they run as any
module of this collection does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from ansible_collections.gpufleet.driver.plugins.action.driver_info import ActionModule as NodeAction
from ansible_collections.gpufleet.driver.plugins.module_utils import answers, settings

_MODULES = "ansible_collections.gpufleet.driver.plugins.modules"


class ActionModule(NodeAction):
    def act(self, variables: dict[str, Any]) -> dict[str, Any]:
        if not self._here(variables):
            return super().act(variables)
        module = import_module(f"{_MODULES}.{self._task.action.rpartition('.')[2]}")
        checked = ArgumentSpecValidator(**module.SPEC).validate(settings.plain(self._task.args))
        if checked.error_messages:
            return {"failed": True, "msg": "; ".join(checked.error_messages)}
        try:
            result: dict[str, Any] = module.answer(checked.validated_parameters, self._task.check_mode)
        except answers.Failed as exc:
            return {**exc.result, "failed": True, "msg": str(exc)}
        return result

    def _here(self, variables: dict[str, Any]) -> bool:
        """Whether the module is to run on this machine, by this Python, as this user, and in this environment."""
        if self._connection.transport != "local" or self._connection.become or self._task.async_val:
            return False
        about = variables
        if self._task.delegate_to:
            about = variables.get("ansible_delegated_vars", {}).get(self._task.delegate_to, {})
        python = self._templar.template(about.get("ansible_python_interpreter", ""))
        return python == sys.executable and not any(self._task.environment or ())
