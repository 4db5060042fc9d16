# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attribute blocks shared by the modules of this collection."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in check mode and return the status it predicts, without changing anything.
  diff_mode:
    description: Returns details on what has changed (or would change in check mode) when in diff mode.
  idempotent:
    description: When run twice in a row with the same arguments, the second run reports nothing changed.
"""

    INFO = r"""
options: {}
attributes:
  check_mode:
    description: Can run in check mode; it never changes anything.
    support: full
  diff_mode:
    description: Returns details on what has changed.
    support: N/A
    details: This module changes nothing.
  idempotent:
    description: When run twice in a row with the same arguments, the second run reports nothing changed.
    support: full
"""

    FLEET = r"""
options: {}
attributes:
  action_group:
    description: Use C(group/gpufleet.driver.fleet) in C(module_defaults) to set defaults for this module.
    support: full
    membership:
      - gpufleet.driver.fleet
"""

    NODE = r"""
options: {}
attributes:
  action_group:
    description: Use C(group/gpufleet.driver.node) in C(module_defaults) to set defaults for this module.
    support: full
    membership:
      - gpufleet.driver.node
"""
