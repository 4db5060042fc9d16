# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU of the whole census over that of a C program that only reads every link under /proc/*/fd. Aim: 2 or less."""

from __future__ import annotations

import json
import tempfile

import crowd


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, crowd.crowd() as there:
        peer = crowd.floor(directory)
        print(json.dumps({"bench": "holders_vs_floor", **crowd.compare(peer, there)}))


if __name__ == "__main__":
    main()
