# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Take one census of the processes that have device MAJOR MINOR open, as module_holders_info does, and print it."""

from __future__ import annotations

import json
import resource
import sys

from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders


def _cpu() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


number = (int(sys.argv[1]), int(sys.argv[2]))
before = _cpu()
census = holders.take(devices=holders.Devices({number: holders.Device("/dev/nvidia0", "nvidia", "gpu")}, {}))
print(json.dumps({"cpu_s": _cpu() - before, "pids": [one.process.pid for one in census.processes if one.process]}))
