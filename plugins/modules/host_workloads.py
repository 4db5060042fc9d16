#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: host_workloads
version_added: 1.0.0
short_description: Stop the work on a plain machine and start it again
description:
  - Stops systemd units and containers by name, never by killing processes, and starts again exactly what was running.
    What that was is written to the node's journal first.
  - GPU processes that belong to no declared workload and to no service of the platform are waited for before anything
    is stopped. If they do not end, the module fails and the declared work goes on.
  - Until they are started again, units are kept from being started by a drop-in with a condition below
    C(/etc/systemd/system), which also holds over a reboot, and the restart policy of containers is suspended.
  - Running units that systemd stops together with a unit, because they require it, are treated alike.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
attributes:
  check_mode:
    support: full
    details: It does not wait. With O(state=stopped), RV(undeclared) says what would be waited for.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  state:
    description:
      - V(stopped) frees the node of work. Containers are stopped first, then units, each in the order of O(workloads).
      - V(started) starts what was running before, in the reverse order, and checks it.
      - V(hosted) starts O(workloads) of O(origin) on this node while that node is upgraded, and checks them. They have
        to be stopped there. It refuses, before it starts anything, if they run here already for anybody else, if they
        are not there to be started, or if this node is being upgraded itself.
      - V(returned) stops on this node what V(hosted) has started for O(origin), so that it can be started there again.
      - V(listed) changes nothing. RV(work) says what uses the GPUs, and what V(stopped) would do about it.
    type: str
    choices: [stopped, started, hosted, returned, listed]
    required: true
  workloads:
    description:
      - The work on this node. One that is not there, or not running, is left as it is and not started later.
      - With O(state=started), only O(workloads[].ready) and O(workloads[].ready_timeout) are used. The rest is in the
        journal.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name for messages and for the journal, different for each workload of a node.
        type: str
        required: true
      unit:
        description: The systemd unit that runs it. C(.service) may be left out.
        type: str
      container:
        description:
          - Name or id of the container that is it. A container that podman's systemd integration runs is stopped and
            started by its unit.
          - Together with O(workloads[].unit), it only tells whose the GPU processes in the container are, for a unit
            that calls C(docker run).
        type: str
      engine:
        description: The engine of O(workloads[].container).
        type: str
        choices: [podman, docker]
        default: podman
      stop_timeout:
        description:
          - Seconds it may take to end after it was told to. A container is then killed by its engine. A unit follows
            its own C(TimeoutStopSec), and the module fails if it is still there 30 seconds later than this.
        type: int
        default: 60
      ready:
        description: Command, as a list of arguments, that exits with 0 once the work does what it is for.
        type: list
        elements: str
        default: []
      save:
        description:
          - How it is saved and moved, for M(gpufleet.driver.workload_move). This module makes no use of it, so that one
            declaration serves both.
        type: dict
      ready_timeout:
        description: Seconds until it must run, and again until O(workloads[].ready) must have succeeded.
        type: int
        default: 120
      elsewhere:
        description:
          - Another host that has the same unit or container, not running. The role C(evacuate) starts it there while it
            is stopped here.
        type: str
      come_back:
        description: Whether it is stopped there and started here again afterwards. If not, it stays there.
        type: bool
        default: true
  origin:
    description: The node whose work it is. Required with O(state=hosted) and O(state=returned).
    type: str
  back_from:
    description:
      - Hosts on which no work of this node runs any more. O(state=started) fails if work was started on any other, as
        it must not run on two.
    type: list
    elements: str
    default: []
  stay:
    description: Names of work that O(state=started) does not start, because it stays where it was started instead.
    type: list
    elements: str
    default: []
  wait:
    description: Seconds to wait for GPU processes that nobody declared to end by themselves.
    type: int
    default: 300
  waited:
    description:
      - How many seconds of O(wait) are over. In a playbook, O(waited) and O(look) are set for you, so that a person
        sees every 20 seconds what a node waits for.
    type: float
    default: 0
  look:
    description: Seconds after which this says with RV(waiting) what it waits for. V(0) is never.
    type: float
    default: 0
  undeclared:
    description:
      - What happens to GPU processes that nobody declared.
      - With V(wait), the module fails when O(wait) is over.
      - With V(refuse), it fails at once.
      - With V(stop), the service or container they belong to is stopped when O(wait) is over, and started again later.
        For a process of a login session the module fails.
    type: str
    choices: [wait, refuse, stop]
    default: wait
  extra_units:
    description:
      - Units that are no work although they have GPUs open, because M(gpufleet.driver.gpu_services) stops them. Give
        it the same list as that module.
    type: list
    elements: str
    default: []
seealso:
  - module: gpufleet.driver.gpu_services
  - module: gpufleet.driver.module_holders_info
"""

EXAMPLES = r"""
- name: Stop the work
  gpufleet.driver.host_workloads:
    state: stopped
    workloads:
      - name: inference
        unit: inference.service
        stop_timeout: 120
        ready: [curl, --fail, --silent, "http://127.0.0.1:8000/health"]
      - name: notebook
        container: notebook
        engine: docker
    wait: 1800

- name: Start what was running
  gpufleet.driver.host_workloads:
    state: started

- name: Start work of another node here while that one is upgraded
  gpufleet.driver.host_workloads:
    state: hosted
    origin: gpu-node-01
    workloads:
      - name: inference
        unit: inference.service

- name: See what uses the GPUs, also what nobody declared
  gpufleet.driver.host_workloads:
    state: listed
    workloads:
      - name: inference
        unit: inference.service
"""

RETURN = r"""
work:
  description: All work that uses GPUs, and all that is declared.
  type: list
  elements: dict
  returned: with O(state=listed)
  contains:
    name:
      description:
        - The name that was declared, or else that of the unit, container, pod, job or login session it is. It stays the
          same for as long as the work runs.
      type: str
      returned: always
    kind:
      description: V(unit), V(container), V(pod), V(job), V(session) or V(process).
      type: str
      returned: always
    declared:
      description: Whether it is in O(workloads).
      type: bool
      returned: always
    what:
      description: The unit or container it is, or its name.
      type: str
      returned: always
    state:
      description: V(running), V(stopped), or V(missing) for declared work that is not on this node.
      type: str
      returned: always
    owner:
      description: Who logged in and started it, or the user it runs as.
      type: str
      returned: always
    gpus:
      description: Indices of the GPUs it computes on, as C(nvidia-smi) counts them.
      type: list
      elements: int
      returned: always
    memory:
      description: Bytes of GPU memory it has. Null if the driver does not say.
      type: int
      returned: always
    since:
      description: When its first process was started, in Unix seconds.
      type: float
      returned: always
    pids:
      description: Its processes that have GPUs open.
      type: list
      elements: int
      returned: always
    processes:
      description: The same, each as a phrase for a message.
      type: list
      elements: str
      returned: always
    next:
      description: What would end it.
      type: str
      returned: always
    may:
      description:
        - What may be done to it, in the words of a plan - V(restart) is to stop and start it again, V(move) to move it
          if that is possible, V(wait) to wait for it.
      type: list
      elements: str
      returned: always
    wait:
      description: Seconds that it is waited for at most.
      type: int
      returned: always
    elsewhere:
      description: The host on which it is started meanwhile, if there is one.
      type: str
      returned: always
    then:
      description: What O(state=stopped) would do about it, with the same O(wait) and O(undeclared).
      type: str
      returned: always
stopped:
  description: Names of the workloads that were running and were stopped.
  type: list
  elements: str
  returned: with O(state=stopped) and O(state=returned)
elsewhere:
  description: Work that ran here and is to be started on another host, with the name of that host.
  type: dict
  returned: with O(state=stopped)
kept:
  description: Names of the workloads that stay on this node.
  type: list
  elements: str
  returned: with O(state=returned)
missing:
  description: Names of the workloads that are not on this node.
  type: list
  elements: str
  returned: with O(state=stopped)
undeclared:
  description:
    - GPU processes that nobody declared and that were still there when O(wait) was over.
    - With O(undeclared=stop), their services and containers are among RV(stopped).
  type: list
  elements: dict
  returned: with O(state=stopped)
  contains:
    pid:
      description: Process id.
      type: int
      returned: always
    name:
      description: Its name, as the kernel keeps it.
      type: str
      returned: always
    title:
      description: Its id and name, and the largest thing it is part of.
      type: str
      returned: always
    next:
      description: What would end it.
      type: str
      returned: always
    user:
      description: Who logged in and started it, or its user.
      type: str
      returned: always
    since:
      description: When it was started, in Unix seconds.
      type: float
      returned: always
    unit:
      description: The unit of the system it is in.
      type: str
      returned: always
    container:
      description: Id of the container it is in.
      type: str
      returned: always
    management:
      description: Whether it watches GPUs rather than computes on them.
      type: bool
      returned: always
    kind:
      description: What the largest thing is that it is part of, as in RV(work[].kind).
      type: str
      returned: always
    part_of:
      description: The name of that thing.
      type: str
      returned: always
    gpus:
      description: Indices of the GPUs whose device nodes it has open.
      type: list
      elements: int
      returned: always
    memory:
      description: Bytes of GPU memory it has. Null where it was not asked for.
      type: int
      returned: always
waited:
  description: Seconds that were waited for them.
  type: float
  returned: with O(state=stopped)
waiting:
  description: Whether there is time left to wait for them.
  type: bool
  returned: on failure with O(look), if it is so
started:
  description: Names of the workloads that were running before and were started.
  type: list
  elements: str
  returned: with O(state=started) and O(state=hosted)
left_stopped:
  description: Names of the workloads that were not running before, and so were not started.
  type: list
  elements: str
  returned: with O(state=started)
failed_workloads:
  description: Names of the workloads that did not come back. The module fails if there is one.
  type: list
  elements: str
  returned: with O(state=started)
cordon:
  description:
    - How the node was found before it was taken out of service, as O(gpufleet.driver.node_journal#module:cordon); null
      if the journal does not say. So whoever gives the node back need not ask for it.
  returned: with O(state=started)
  type: dict
workloads:
  description: State of each workload after this task.
  type: dict
  returned: with O(state=stopped) and O(state=started)
  sample:
    inference: stopped
    notebook: missing
busy:
  description: Whether another module of this collection is still at work on the node, so that waiting helps.
  type: bool
  returned: on failure
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders, nvml
from ansible_collections.gpufleet.driver.plugins.module_utils.host.guests import Guests
from ansible_collections.gpufleet.driver.plugins.module_utils.host.systemd import SystemdError
from ansible_collections.gpufleet.driver.plugins.module_utils.host.workloads import (
    ENGINES,
    Holder,
    Workload,
    Workloads,
    WorkloadsError,
    from_census,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import CORDON, Journal, JournalBusy, JournalError
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError

NVML_SECONDS = 20
STATES = ("stopped", "started", "hosted", "returned", "listed")


def census() -> list[Holder]:
    return from_census(holders.take(run=execution.run))


def census_with_usage() -> list[Holder]:
    taken = holders.take(run=execution.run)
    return from_census(taken, usage=nvml.usage(NVML_SECONDS) if taken.processes else None)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": list(STATES), "required": True},
            "workloads": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "unit": {"type": "str"},
                    "container": {"type": "str"},
                    "engine": {"type": "str", "choices": list(ENGINES), "default": "podman"},
                    "stop_timeout": {"type": "int", "default": 60},
                    "ready": {"type": "list", "elements": "str", "default": []},
                    "save": {"type": "dict"},
                    "ready_timeout": {"type": "int", "default": 120},
                    "elsewhere": {"type": "str"},
                    "come_back": {"type": "bool", "default": True},
                },
                "required_one_of": [("unit", "container")],
            },
            "origin": {"type": "str"},
            "back_from": {"type": "list", "elements": "str", "default": []},
            "stay": {"type": "list", "elements": "str", "default": []},
            "wait": {"type": "int", "default": 300},
            "waited": {"type": "float", "default": 0},
            "look": {"type": "float", "default": 0},
            "undeclared": {"type": "str", "choices": ["wait", "refuse", "stop"], "default": "wait"},
            "extra_units": {"type": "list", "elements": "str", "default": []},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        required_if=[("state", "hosted", ("origin",)), ("state", "returned", ("origin",))],
        supports_check_mode=True,
    )
    p = module.params
    declared = [
        Workload(
            **{key: value for key, value in given.items() if key not in ("save", "ready")},
            ready=tuple(given["ready"]),
            movable=bool(given["save"]),
        )
        for given in p["workloads"]
    ]
    try:
        listed = p["state"] == "listed"
        read_only = module.check_mode or p["state"] not in ("stopped", "started")
        journal = Journal.open(p["state_dir"], read_only=read_only)
        look = census_with_usage if listed else census
        node = Workloads(journal, execution.run, look, module.log, extra_units=p["extra_units"])
        if listed:
            work = node.survey(declared, p["wait"], p["undeclared"])
            module.exit_json(changed=False, work=work)
        if p["state"] == "stopped":
            result = node.stop(
                declared, p["wait"], p["undeclared"], check=module.check_mode, waited=p["waited"], look=p["look"]
            )
        elif p["state"] == "started":
            result = node.start(declared, check=module.check_mode, stay=p["stay"], back_from=p["back_from"])
            result["cordon"] = journal.before(CORDON)
        else:
            guests = Guests(node, p["state_dir"], time.time)
            if p["state"] == "hosted":
                result = guests.take_in(declared, p["origin"], check=module.check_mode)
            else:
                result = guests.send_home(p["origin"], check=module.check_mode)
    except WorkloadsError as exc:
        for warning in exc.result.pop("warnings", []):
            module.warn(warning)
        module.fail_json(msg=str(exc), **exc.result)
    except (SystemdError, JournalError, StateFileError) as exc:
        module.fail_json(msg=str(exc), busy=isinstance(exc, JournalBusy))
    for warning in result.pop("warnings", []):
        module.warn(warning)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
