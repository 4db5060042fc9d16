# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in libcuda, and a machine made of files on which real processes use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cuda_work import SOURCES, VERSION, Gpus


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    subprocess.run(
        ["gcc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1",
         f'-DSTANDIN_VERSION="{VERSION}"', "-o", folder / "libcuda.so.1", SOURCES / "cuda.c", SOURCES / "standin.c"],
        check=True, timeout=120,
    )  # fmt: skip
    return folder


@pytest.fixture
def gpus(tmp_path: Path, library: Path) -> Iterator[Gpus]:
    for name in ("run/nvidia-standin", "dev"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    environment = {**os.environ, "NVIDIA_STANDIN_ROOT": str(tmp_path), "LD_LIBRARY_PATH": str(library)}
    made = Gpus(tmp_path, environment, [])
    made.machine()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
