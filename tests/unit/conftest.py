# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how near to the optimum the plans of ``planning/test_optimum.py`` were, also where they were near enough."""
    found = [
        tuple(fleet)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, fleets in report.user_properties
        if name == "optimum"
        for fleet in fleets
    ]
    if found:
        mean = sum(share for share, *dummy in found) / len(found)
        share, seed, ours, optimum = max(found)
        terminalreporter.write_line(
            f"optimum: {len(found)} fleets lose {mean:.1%} more GPU-hours than at least, as a mean; the worst is seed "
            f"{seed} with {share:.1%} more, {ours / 3600:.2f} of {optimum / 3600:.2f}"
        )
