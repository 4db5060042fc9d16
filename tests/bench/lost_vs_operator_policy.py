# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPU-hours of work the example fleets lose with a plan, over those lost by the way "operator"."""

from __future__ import annotations

import json

import example_losses

if __name__ == "__main__":
    print(json.dumps({"bench": "lost_vs_operator_policy", **example_losses.line("operator")}))
