# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""We die between any two changes of the cluster, and the next call finishes what was begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from cluster import RUN, Cluster, evacuate, go, until
from operator_cluster import NEW, OLD, OperatorCluster
from standin import SKIP

from ansible_collections.gpufleet.driver.plugins.module_utils import kubernetes_api
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import gpu_operator_objects
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.gpu_operator import GpuOperator


class Died(BaseException):
    pass


class Mortal(kubernetes_api.Api):
    """Sends one request at a time, and dies before the one that changes something once too often."""

    def __init__(self, kubeconfig: str, changes: int) -> None:
        super().__init__(kubeconfig, workers=1)
        self._left = changes
        self._lock = threading.Lock()

    def request(self, method: str, path: str, *given: Any, **query: Any) -> kubernetes_api.Answer:
        if method != "GET" and "dryRun" not in query:
            with self._lock:
                if not self._left:
                    raise Died
                self._left -= 1
        return super().request(method, path, *given, **query)


def at_last(cluster: Cluster, act: Callable[[Mortal], Any]) -> int:
    """Call ``act`` until it survives, with one change more each time; how often it died."""
    for changes in range(100):
        try:
            act(Mortal(str(cluster.kubeconfig), changes))
            return changes
        except Died:
            continue
    raise AssertionError("it never ends")


def test_a_node_is_taken_out_emptied_proven_and_put_back(cluster: Cluster) -> None:
    taken, goal = cluster.nodes(2, labels={"dcgm": "on"})
    cluster.change(goal, spec={"unschedulable": True})
    cluster.apps("daemonsets", "dcgm", gpus=0, container={"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
                 nodeSelector={"dcgm": "on"})  # fmt: skip
    pods = cluster.deployment("llama", replicas=2)
    cluster.change(goal, spec={"unschedulable": None})
    before = cluster.node(taken)
    backend = cluster.backend(validation_image="lab.gpufleet/ends:1")

    def with_api(call: Callable[[], Any]) -> Callable[[Mortal], Any]:
        def act(api: Mortal) -> Any:
            backend._api = api
            return call()

        return act

    died = {
        "cordon": at_last(cluster, with_api(lambda: backend.cordon([taken], RUN))),
        "evacuate": at_last(cluster, with_api(lambda: evacuate(backend, [taken], go(cluster, *pods, to=(goal,))))),
        "validate": at_last(cluster, with_api(lambda: backend.validate([taken], RUN, {}, 120))),
    }
    assert {pod["spec"]["nodeName"] for pod in cluster.pods(labelSelector="app=llama")} == {goal}
    assert cluster.node(taken)["spec"]["unschedulable"]
    died["uncordon"] = at_last(cluster, with_api(lambda: backend.uncordon([taken], RUN)))
    died["settle"] = at_last(cluster, with_api(lambda: backend.settle(RUN)))
    after = cluster.node(taken)
    assert [after["metadata"][part] for part in ("labels", "annotations")] == [
        before["metadata"][part] for part in ("labels", "annotations")
    ]
    assert not after["spec"].get("taints") and not after["spec"].get("unschedulable")
    until("the DaemonSet is back", lambda: len(cluster.pods_of("dcgm")) == 2)
    assert cluster.backend().settle(RUN) == []
    assert all(died.values()), died


def test_a_driver_is_changed_by_the_operator(operated: OperatorCluster) -> None:
    first, second = operated.begin(2)
    operated.cordon(first)

    def swap(api: Mortal) -> None:
        its = GpuOperator(api, "run-1").swap([first], NEW, time.time() + 120, 120)[first]
        assert its.done, its

    died = [at_last(operated, swap), at_last(operated, lambda api: GpuOperator(api, "run-1").settle())]
    assert all(died) and [operated.loaded(name) for name in (first, second)] == [NEW, OLD]
    assert operated.version() == NEW and operated.label(second, SKIP) == "true"
    assert operated.swap(first)[first].changed is False, "nothing is done twice"
    operated.cordon(second)
    operated.swap(second)
    operated.driver().settle()
    for name in (first, second):
        meta = operated.node(name)["metadata"]
        assert gpu_operator_objects.NOTE not in meta["annotations"] and SKIP not in meta["labels"]
