# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Show what a node waits for while it waits: a module can only speak when it ends, so it is run again and again."""

from __future__ import annotations

import time
from typing import Any

from ansible.utils.display import Display

from ansible_collections.gpufleet.driver.plugins.action.driver_info import ActionModule as NodeAction

FIRST_LOOK, LOOK = 3, 20
"""Seconds until what is waited for is shown, and until it is shown again."""


class ActionModule(NodeAction):
    def act(self, variables: dict[str, Any]) -> dict[str, Any]:
        given = self._task.args
        if given.get("state") != "stopped" or given.get("look") or self._task.async_val:
            return super().act(variables)
        began, look = time.monotonic(), FIRST_LOOK
        while True:
            waited = time.monotonic() - began
            arguments = {**given, "waited": waited, "look": look}
            result: dict[str, Any] = self._execute_module(module_args=arguments, task_vars=variables)
            if not result.get("waiting"):
                return result
            Display().display(f"{variables.get('inventory_hostname')}: {result['msg']}")
            look = LOOK
