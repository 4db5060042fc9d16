# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the roles tell a person about many nodes; each filter is documented in the file of its name."""

from __future__ import annotations

from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import account


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "grouped": account.grouped,
            "reasons": account.reasons,
            "next_steps": account.next_steps,
            "moves": account.moves,
            "started_with": account.started_with,
            "status_lines": account.status_lines,
            "outcomes": account.outcomes,
            "doubles": account.doubles,
            "driver_versions": account.driver_versions,
            "upgrade_lines": account.upgrade_lines,
            "return_lines": account.return_lines,
            "work_lines": account.work_lines,
            "durations": account.durations,
            "timeline": account.timeline,
            "lasted": account.lasted,
        }
