# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Page maps and page files as CRIU writes them, whole and cut short."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import images

PAGE = os.sysconf("SC_PAGE_SIZE")


def varint(value: int) -> bytes:
    data = b""
    while value > 0x7F:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def message(**fields: int) -> bytes:
    numbers = {"id": 1, "address": 1, "old_pages": 2, "in_parent": 3, "flags": 4, "pages": 5}
    data = b"".join(varint(numbers[name] << 3) + varint(value) for name, value in fields.items())
    return struct.pack("<I", len(data)) + data


def page_map(*entries: bytes) -> bytes:
    return struct.pack("<II", 0x54564319, 0x56084025) + message(id=1) + b"".join(entries)


MAPS = {
    "present": ([message(address=1 << 46, old_pages=300, flags=4)], 300),
    "before-flags-were-there": ([message(address=4096, old_pages=3)], 3),
    "in-the-parent": ([message(address=4096, old_pages=3, in_parent=1), message(address=8192, old_pages=2)], 2),
    "lazy": ([message(address=4096, old_pages=3, flags=6), message(address=4096, old_pages=9, flags=1)], 3),
    "counted-in-64-bits": ([message(address=4096, old_pages=0, flags=4, pages=70000)], 70000),
    "nothing": ([], 0),
}


@pytest.mark.parametrize(("entries", "pages"), MAPS.values(), ids=MAPS)
def test_a_page_map_tells_how_many_pages_there_are(tmp_path: Path, entries: list[bytes], pages: int) -> None:
    (tmp_path / "pagemap-7.img").write_bytes(page_map(*entries))
    assert images.page_files(tmp_path) == {"pages-1.img": pages * PAGE}


def test_pages_that_are_missing_are_found(tmp_path: Path) -> None:
    (tmp_path / "pagemap-7.img").write_bytes(page_map(message(address=4096, old_pages=2)))
    assert "no file" in images.wrong(tmp_path)[0]
    (tmp_path / "pages-1.img").write_bytes(bytes(PAGE))
    assert f"{PAGE} bytes" in images.wrong(tmp_path)[0]
    (tmp_path / "pages-1.img").write_bytes(bytes(2 * PAGE))
    assert images.wrong(tmp_path) == []


@pytest.mark.parametrize("data", [b"", b"\0" * 40, page_map()[:-1], page_map(message(address=1))[:-1]])
def test_a_page_map_that_was_cut_short_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "pagemap-7.img").write_bytes(data)
    with pytest.raises(images.ImageError, match="pagemap-7"):
        images.wrong(tmp_path)
