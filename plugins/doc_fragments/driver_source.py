# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that change the driver of a node."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  version:
    description:
      - The full driver version to bring the node to, for example V(580.95.05). A branch such as V(580) is not enough.
    type: str
  flavour:
    description:
      - Which kernel modules. V(auto) keeps those that are installed.
    type: str
    choices: [auto, open, proprietary]
    default: auto
  source:
    description:
      - Where the driver comes from. V(auto) keeps to what installed it.
      - Another source than the one that installed the driver is refused - two install methods on one node end in a
        module of one and libraries of the other.
      - V(zypper) is judged and never changed in this release.
    type: str
    choices: [auto, apt, dnf, zypper, runfile]
    default: auto
  runfile:
    description: Path on the node of NVIDIA's installer of O(version), for O(source=runfile).
    type: path
  runfile_checksum:
    description: SHA-256 of O(runfile), in hexadecimal.
    type: str
  previous_runfile:
    description:
      - Path on the node of the installer of today's driver, which is kept for the way back. Not needed where an
        earlier upgrade with this collection kept it.
    type: path
  release_holds:
    description:
      - Patterns of held (apt) or locked (dnf) packages that may be moved, such as V(*nvidia*). Others are refused.
      - The holds are set again afterwards, on the packages that take the place of the held ones.
    type: list
    elements: str
    default: []
  rollback_required:
    description:
      - Refuse to start where the packages of today could not be put back, since no repository has them any more and
        they were not saved.
    type: bool
    default: true
  lock_timeout:
    description: Seconds to wait for another package manager, such as an automatic upgrade that has begun.
    type: int
    default: 300
"""
