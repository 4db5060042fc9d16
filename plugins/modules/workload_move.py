#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: workload_move
version_added: 1.0.0
short_description: Move running work from a node to others, and home again
description:
  - Saves the work of the node the task runs on, brings each save to the first node that can take it, and restores and
    proves it there. Calls M(gpufleet.driver.workload_checkpoint), M(gpufleet.driver.checkpoint_fetch) and
    M(gpufleet.driver.workload_restore) on both ends, in an order in which the work is at every moment either running or
    saved, and never running twice.
  - Work that nobody can take in runs on. Work that was ended and comes back nowhere is started again from its own
    state. RV(workloads[].reasons) tell why, each one of a fixed set.
  - All that is remembered lies on the nodes. After an interruption, run the same task again from anywhere. If nobody
    does, a timer on the node lets the work go on.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.checkpoint.store
  - gpufleet.driver.checkpoint.limits
  - gpufleet.driver.node
attributes:
  check_mode:
    support: partial
    details:
      - Foretells RV(workloads) by all that shows before anything is touched. The node that is named is the first with
        an equal key. Whether it has room, and the declared files a place, is only known of a save that is there.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  state:
    description:
      - V(away) moves O(workloads) from this node to O(candidates).
      - V(home) ends work that was taken in here as its owner wants it to end, and starts it, with its files, on the
        node it came from if that is among O(candidates). This is for a node that is upgraded itself, as the image of a
        process does not survive another driver.
    type: str
    choices: [away, home]
    default: away
  workloads:
    description:
      - The workloads of this node, as C(gpu_workloads) declares them. Those without C(save) are left alone. How C(save)
        is given is described with O(gpufleet.driver.workload_checkpoint#module:workloads[].save).
    type: list
    elements: dict
    default: []
  candidates:
    description: Names of the nodes to try, in this order.
    type: list
    elements: str
    default: []
  shared:
    description: Whether O(store) is one directory that all nodes see, so that nothing has to be copied.
    type: bool
    default: false
  gang:
    description:
      - Whether the workloads belong together, so that all move to one node or none does. With O(state=home), each goes
        by itself.
    type: bool
    default: false
  unsaved:
    description:
      - What to think of a workload that could be neither moved nor saved.
      - With V(stop), it is one that will be stopped and started again like any without C(save).
      - With V(refuse), the task fails.
    type: str
    choices: [stop, refuse]
    default: stop
  waived:
    description: Fields of the compatibility key that are not compared, by name.
    type: list
    elements: str
    default: []
  patience:
    description: Seconds to wait for a node that stops answering while work comes back on it.
    type: int
    default: 300
  settle:
    description: Seconds after which restored work must still be well.
    type: int
    default: 10
  concurrency:
    description: How many workloads are dealt with at a time.
    type: int
    default: 4
seealso:
  - module: gpufleet.driver.workload_checkpoint
  - module: gpufleet.driver.workload_restore
  - module: gpufleet.driver.checkpoint_fetch
  - module: gpufleet.driver.checkpoint_info
"""

EXAMPLES = r"""
- name: Move the trainer to one of the nodes that are upgraded last
  gpufleet.driver.workload_move:
    workloads:
      - name: trainer
        unit: trainer.service
        save:
          paths: [/var/lib/trainer]
          progress: [cat, /var/lib/trainer/step]
    candidates: [node8, node7]
  register: moved

- name: Bring it back
  gpufleet.driver.workload_move:
    state: home
    candidates: [node1]
  delegate_to: node8
"""

RETURN = r"""
workloads:
  description: What became of each workload.
  type: list
  elements: dict
  returned: always
  contains:
    workload:
      description: Its name.
      type: str
      returned: always
    how:
      description:
        - V(moved), it runs on another node. V(saved), it has saved itself and runs on. V(stayed), it runs on here and
          is not saved, or runs here again from its save, as no other node could restore it. V(cold_start), it was
          ended and started again from its own state. V(absent), it was not running here. V(unknown), it may run on, or
          stand still on, a node that does not answer or could not say. V(lost), it does not run and cannot be started;
          C(kept) names its save, if there is one, from which the next run goes on.
      type: str
      returned: always
    to:
      description: The node it runs on, or may run on.
      type: str
      returned: always
    reasons:
      description:
        - Why something better did not succeed, in the order it came up. Each has C(reason) (one of a fixed set),
          C(step), C(observed), C(expected), C(next) and C(source), which says how the work was at its source then.
      type: list
      elements: dict
      returned: always
    bytes:
      description: Size of the save.
      type: int
      returned: always
    seconds:
      description: For which it stood still.
      type: float
      returned: always
    kept:
      description: Id of its save, if that stays on this node until it expires, as the work did not go on from it.
      type: str
      returned: always
    next:
      description: The command that tells whether it could still be restored there. The same with V(restored) does that.
      type: str
      returned: always
    progress:
      description:
        - What its C(save.progress) printed before it was saved and at each look since it came back; empty without one.
      type: list
      elements: float
      returned: always
moved:
  description: Name of each workload that moved, with the node it runs on.
  type: dict
  returned: always
guests:
  description: Work that was taken in and stays, as it was declared.
  type: list
  elements: dict
  returned: with O(state=home)
lost:
  description: Whether the failure was a lost connection to the node that has the work.
  type: bool
  returned: failure
"""
