# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every scheduler there is, by the name users write. Only the one that is asked for is imported.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Scheduler, SchedulerError

NAMES = ("hosts",)


def get(name: str, run: Runner, options: Mapping[str, Any]) -> Scheduler:
    """The scheduler ``name``; it takes from ``options`` (a module's parameters) what is its own.

    :raises SchedulerError: if there is none of that name, or its options do not fit.
    """
    if name == "hosts":
        from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.hosts import Hosts

        own = ("state_dir", "ours", "cordon_command", "uncordon_command", "state_command", "timeout")
        return Hosts(run, **{key: options[key] for key in own})
    raise SchedulerError(f"no scheduler is called {name!r}; expected one of {', '.join(NAMES)}")
