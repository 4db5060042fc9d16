# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What may be set for a run; each filter is documented in the file of its name."""

from __future__ import annotations

from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import settings


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "settings_of_roles": settings.of_roles,
            "wrong_settings": settings.wrong,
            "misspelt": settings.misspelt,
        }
