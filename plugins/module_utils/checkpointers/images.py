# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the images that CRIU wrote are whole: its files of pages hold as many as its page maps say.

CRIU tells success for a page file that was cut short, and its restore of one spins without an end. The format is that
of criu/include/magic.h and images/pagemap.proto: two magic numbers, then messages, each after its length.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

_COMMON, _PAGEMAP = 0x54564319, 0x56084025
_PRESENT, _PARENT = 4, 1
_PAGES_ID, _COMPAT_PAGES, _IN_PARENT, _FLAGS, _PAGES = 1, 2, 3, 4, 5


class ImageError(Exception):
    """An image that cannot be read as one; the text says which."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7


def _numbers(message: bytes) -> dict[int, int]:
    """The number fields of a protocol buffer message by their number; others are passed over."""
    found: dict[int, int] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            found[tag >> 3], at = _varint(message, at)
        elif kind == 2:
            length, at = _varint(message, at)
            at += length
        else:
            at += {1: 8, 5: 4}[kind]
    return found


def _messages(data: bytes) -> Iterator[dict[int, int]]:
    if len(data) < 8 or struct.unpack_from("<II", data) != (_COMMON, _PAGEMAP):
        raise ValueError
    at = 8
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        if at + 4 + length > len(data):
            raise ValueError
        yield _numbers(data[at + 4 : at + 4 + length])
        at += 4 + length


def _pages(entry: dict[int, int]) -> int:
    flags = entry.get(_FLAGS, _PARENT if entry.get(_IN_PARENT) else _PRESENT)
    return entry.get(_PAGES, entry.get(_COMPAT_PAGES, 0)) if flags & _PRESENT else 0


def page_files(images: Path) -> dict[str, int]:
    """Page files that the page maps in a directory refer to, with the bytes each must have.

    :raises ImageError: if a page map is cut short or is none.
    """
    size = os.sysconf("SC_PAGE_SIZE")
    wanted: dict[str, int] = {}
    for path in sorted(images.glob("pagemap-*.img")):
        try:
            head, *entries = _messages(path.read_bytes())
            name = f"pages-{head[_PAGES_ID]}.img"
        except (ValueError, KeyError, IndexError, struct.error):
            raise ImageError(f"{path.name} is not a whole page map") from None
        wanted[name] = wanted.get(name, 0) + size * sum(_pages(entry) for entry in entries)
    return wanted


def wrong(images: Path) -> list[str]:
    """What is wrong with the pages of a dump; empty if all are there.

    :raises ImageError: if a page map cannot be read.
    """
    found = []
    for name, size in page_files(images).items():
        has = (images / name).stat().st_size if (images / name).exists() else None
        if has != size:
            found.append(f"{name} has {'no file' if has is None else f'{has} bytes'}, its page map tells of {size}")
    return found
