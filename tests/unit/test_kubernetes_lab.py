# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A control plane that cannot be had is one thing, and tests are skipped for it; one that does not build is another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1] / "lab/kubernetes/lab.py"
MISSING, BROKEN = 3, 1


def build(directory: Path, go: str | None, **environment: str) -> tuple[int, str]:
    """Exit status and words of ``lab build`` where ``go`` is that script, or none, and nothing is in the cache."""
    programs = directory / "bin"
    programs.mkdir()
    (programs / "nice").symlink_to(shutil.which("nice") or "/usr/bin/nice")
    if go is not None:
        (programs / "go").write_text(f"#!/bin/sh\n{go}\n")
        (programs / "go").chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if k not in ("KUBEBUILDER_ASSETS", "GPUFLEET_TEST_KUBECONFIG")}
    environment = {**inherited, "PATH": str(programs), "XDG_CACHE_HOME": str(directory / "cache"), **environment}
    argv = [sys.executable, str(LAB), "build"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("go", "status", "words"),
    [
        (None, MISSING, "install Go 1.26"),
        (
            "echo 'go: go.mod requires go >= 1.26.0 (running go 1.19.8; GOTOOLCHAIN=local)' >&2; exit 1",
            MISSING,
            "1.19.8",
        ),
        ("echo 'dial tcp: lookup proxy.example: no such host' >&2; exit 1", MISSING, "a network"),
        ("echo './main.go:17:2: undefined: nothing' >&2; exit 1", BROKEN, "undefined: nothing"),
        ("echo 'verifying module: checksum mismatch' >&2; exit 1", BROKEN, "checksum mismatch"),
    ],
    ids=["no-go", "old-go", "no-network", "compiler-error", "other-module"],
)
def test_only_what_cannot_be_had_is_missing(tmp_path: Path, go: str | None, status: int, words: str) -> None:
    found, said = build(tmp_path, go)
    assert (found, words in said) == (status, True), said


def test_assets_that_are_not_there_are_a_mistake(tmp_path: Path) -> None:
    status, said = build(tmp_path, None, KUBEBUILDER_ASSETS=str(tmp_path))
    assert status == BROKEN and "no kube-apiserver" in said
