# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A module that may run as a program, or within Ansible where that is on the same machine (plugins/action/node_cordon).

It has ``SPEC``, what it takes, and ``answer(params, check_mode)``, which gives its result or raises :class:`Failed`.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

Answer = Callable[[Mapping[str, Any], bool], dict[str, Any]]


class Failed(Exception):
    """The module fails with this message; ``result`` is what it tells besides."""

    def __init__(self, msg: str, **result: Any) -> None:
        super().__init__(msg)
        self.result = result


def give(module: Any, answer: Answer) -> None:
    """Run ``answer`` as the program that an ``AnsibleModule`` is."""
    try:
        result = answer(module.params, module.check_mode)
    except Failed as exc:
        module.fail_json(msg=str(exc), **exc.result)
    module.exit_json(**result)
