# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Slurm lab for as long as a benchmark runs."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAB = Path(__file__).resolve().parents[1] / "lab/slurm/lab"


@contextmanager
def up(*flags: str) -> Iterator[str]:
    """Gives the path of its slurm.conf."""
    with tempfile.TemporaryDirectory(prefix="gpufleet-slurm-") as directory:
        Path(directory).chmod(0o755)
        argv = [str(LAB), "up", "--state", directory, *flags]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=120)
        try:
            yield f"{directory}/etc/slurm.conf"
        finally:
            subprocess.run([str(LAB), "down", "--state", directory], check=True, stdout=subprocess.DEVNULL, timeout=60)
