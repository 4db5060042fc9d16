# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that run on a node and use its journal."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  state_dir:
    description:
      - Directory on the node that holds the journal of an upgrade and what was there before it.
      - It is created with mode V(0700) if it is missing.
    type: path
    default: /var/lib/gpufleet
"""
