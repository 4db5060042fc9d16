# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What was staged, read back from a directory that somebody has been at."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    SourceError,
    StagedFile,
    read_manifest,
    sha256,
    write_manifest,
)


def stage(directory: Path) -> None:
    (directory / "a.deb").write_text("whole")
    write_manifest(directory, [StagedFile("a", "1", "a.deb", sha256(directory / "a.deb"), 5)])


def test_a_file_counts_only_with_its_checksum(tmp_path: Path) -> None:
    assert not read_manifest(tmp_path).files
    stage(tmp_path)
    assert [file.file for file in read_manifest(tmp_path).files] == ["a.deb"]
    (tmp_path / "a.deb").write_text("cut")
    assert not read_manifest(tmp_path).files


@pytest.mark.parametrize("content", ["{", "[]", '{"files": [1]}', '{"files": [{"odd": 1}]}', "\udcff"])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(SourceError, match=r"manifest\.json is damaged .*stage again"):
        read_manifest(tmp_path)


def test_something_else_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "550.90.07").write_text("x")
    with pytest.raises(SourceError, match=r"manifest\.json cannot be read \(Not a directory\)"):
        read_manifest(tmp_path / "550.90.07")
