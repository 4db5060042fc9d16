# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One upgrade at a time, by a Lease of the real API server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster import Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import Api, ApiError
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_lease import (
    NAME,
    ClusterLease,
    LeaseError,
)


def lease(cluster: Cluster) -> ClusterLease:
    return ClusterLease(Api(str(cluster.kubeconfig)), cluster.namespace)


def test_a_run_has_the_cluster_until_it_gives_it_back_or_somebody_takes_over(cluster: Cluster) -> None:
    ours = lease(cluster)
    assert ours.hold("first", "ann@deploy", 600, None, check=True).changed and ours.release("first").after is None
    first = ours.hold("first", "ann@deploy", 600, None).after
    assert first is not None and (first.holder, first.expires - first.renewed) == ("ann@deploy", 600)
    with pytest.raises(LeaseError, match=r"locked by run first by ann@deploy .* -e gpu_lock_takeover=first"):
        ours.hold("second", None, 600, None)
    with pytest.raises(LeaseError, match="gpu_lock_takeover names third, but the cluster is locked by run first"):
        ours.hold("second", None, 600, "third")
    renewed = ours.renew("first", 60).after
    assert renewed is not None and (renewed.holder, renewed.since) == (first.holder, first.since)
    assert "took the cluster over" in ours.hold("second", "bob@laptop", 600, "first").warning
    with pytest.raises(LeaseError, match="run first no longer has the cluster: it is locked by run second"):
        ours.renew("first", 60)
    assert "not released" in ours.release("first").warning
    assert ours.release("second").changed and not ours.release("second").changed
    with pytest.raises(LeaseError, match="it is free"):
        ours.renew("second", 60)


def test_a_namespace_that_is_not_there_is_named(cluster: Cluster) -> None:
    with pytest.raises(ApiError, match='404 namespaces "absent" not found'):
        ClusterLease(Api(str(cluster.kubeconfig)), "absent").hold("first", None, 60, None)


def test_a_lease_that_ran_out_is_free_whatever_clock_its_holder_had(cluster: Cluster) -> None:
    ours = lease(cluster)
    ours.hold("first", None, 1, None)

    def free() -> Any:
        try:
            return ours.hold("second", None, 600, None)
        except LeaseError:
            return None

    assert "had run out" in until("it runs out", free).warning


@pytest.mark.parametrize(
    "spec", [{}, {"holderIdentity": "x"}, {"holderIdentity": "x", "renewTime": "0001-01-01T00:00:00.000000Z"}]
)
def test_what_somebody_has_written_into_it_keeps_nobody_out(cluster: Cluster, spec: dict[str, str]) -> None:
    path = cluster.path("leases", group="coordination.k8s.io/v1")
    cluster.api.post(path, {"metadata": {"name": NAME}, "spec": spec})
    assert lease(cluster).hold("first", None, 600, None).after is not None


def test_of_many_runs_one_gets_it(cluster: Cluster) -> None:
    def ask(run: str) -> str | None:
        try:
            return run if lease(cluster).hold(run, None, 600, None).after else None
        except LeaseError:
            return None

    with ThreadPoolExecutor(8) as pool:
        got = [run for run in pool.map(ask, [f"run-{number}" for number in range(8)]) if run]
    assert len(got) == 1 and lease(cluster).renew(got[0], 60).changed
