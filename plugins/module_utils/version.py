# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA driver versions, and the driver version inside a package version.

Two or three dot fields (``565.77``, ``550.54.15``). Compared as integers, but the text is kept: packages and files
are named ``550.90.07``, never ``550.90.7``.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

_VERSION = re.compile(r"\d{2,4}\.\d{1,3}(?:\.\d{1,3})?")
_PACKAGE = re.compile(rf"^(?:\d+:)?(?P<version>{_VERSION.pattern})(?=$|[-_~+])")


@total_ordering
@dataclass(frozen=True, eq=False)
class DriverVersion:
    """A driver version. ``570.124.04`` and ``570.124.4`` are equal; each keeps its own text."""

    text: str
    fields: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> DriverVersion:
        """:raises ValueError: if ``text`` is not a full driver version (a bare branch such as ``580`` is not)."""
        if not _VERSION.fullmatch(text):
            raise ValueError(f"{text!r} is not an NVIDIA driver version; expected something like 580.95.05")
        return cls(text, tuple(int(field) for field in text.split(".")))

    @property
    def branch(self) -> str:
        """The release branch, for example ``580``."""
        return self.text.split(".")[0]

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DriverVersion) and self.fields == other.fields

    def __lt__(self, other: DriverVersion) -> bool:
        return self.fields < other.fields

    def __hash__(self) -> int:
        return hash(self.fields)


def find(text: str) -> DriverVersion | None:
    """The first driver version in running text, or None."""
    found = re.search(rf"(?<![\d.]){_VERSION.pattern}(?![\d.])", text)
    return DriverVersion.parse(found.group()) if found else None


def of_package(package_version: str) -> DriverVersion | None:
    """The driver version inside a deb or rpm version, or None if it holds none.

    ``3:570.86.10-1.el9`` → 570.86.10; ``550.107.02-0ubuntu0.24.04.1`` → 550.107.02;
    ``580.105.08_k6.12.0_160000.5-1.1`` → 580.105.08. Ubuntu's linux-modules-nvidia packages carry the kernel's
    version (``5.15.0-113.123``) and so give None.
    """
    found = _PACKAGE.match(package_version)
    return DriverVersion.parse(found.group("version")) if found else None
