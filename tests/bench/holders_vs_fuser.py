# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU of the whole census over that of "fuser -v DEVICE", which misses the other namespace. Aim: 1 or less."""

from __future__ import annotations

import json

import crowd


def main() -> None:
    with crowd.crowd() as there:
        print(json.dumps({"bench": "holders_vs_fuser", **crowd.compare(["fuser", "-v", crowd.DEVICE], there)}))


if __name__ == "__main__":
    main()
