# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The script for a real GPU (tests/gpu), on a machine with the stand-in: it runs, and sees what is wrong."""

from __future__ import annotations

from pathlib import Path

from works import HOME, Works

SCRIPT = Path(__file__).resolve().parents[2] / "gpu/real.py"
RUN = "cd /tmp; PYTHONPATH={share} timeout 120 python3 {share}/real.py --mib 64 2>&1; echo rc $?"


def test_the_script_for_a_real_gpu_runs_and_sees_what_is_wrong(works: Works) -> None:
    (works.share / "real.py").write_text(SCRIPT.read_text())
    works.trouble(HOME, ["cuda_lie.cuCheckpointProcessRestore=1"])
    told = works.sh(HOME, RUN.format(share=works.share))
    assert "validated: validate.compute ok" in told and "64  driver" in told, told
    assert told.endswith("rc 1") and "no piece of its memory is wrong, but" in told and "WRONG" in told, told
