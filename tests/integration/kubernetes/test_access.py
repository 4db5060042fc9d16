# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A way to the cluster that is none, or not enough, is said at once, by what is wrong with it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import RUN, Cluster, evacuate, go
from operator_cluster import NEW, OperatorCluster

from ansible_collections.gpufleet.driver.plugins.module_utils import kubernetes_api
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import gpu_operator
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import SchedulerError
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes import Kubernetes

Config = dict[str, Any]
SUBJECT = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=another"]


def no_file(config: Config, path: Path) -> None:
    path.unlink()


def no_yaml(config: Config, path: Path) -> None:
    path.write_text("clusters: [\n")


def no_kubeconfig(config: Config, path: Path) -> None:
    path.write_text("[]")


def empty(config: Config, path: Path) -> None:
    path.write_text("")


def no_such_context(config: Config, path: Path) -> None:
    path.write_text(json.dumps(config | {"current-context": "prod"}))


def wrong_token(config: Config, path: Path) -> None:
    config["users"] = [{"name": "admin", "user": {"token": "expired"}}]
    path.write_text(json.dumps(config))


def another_authority(config: Config, path: Path) -> None:
    authority = path.with_name("another.crt")
    out = ["-keyout", str(path.with_name("another.key")), "-out", str(authority)]
    subprocess.run(["openssl", *SUBJECT, *out], check=True, capture_output=True)
    config["clusters"][0]["cluster"]["certificate-authority"] = str(authority)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_file, "no way to reach a cluster: there is no file .*kubeconfig; give kubeconfig"),
        (no_yaml, "no way to reach a cluster: .*kubeconfig is no kubeconfig .*; look with: kubectl"),
        (no_kubeconfig, "no way to reach a cluster: .*kubeconfig is no kubeconfig"),
        (empty, "no way to reach a cluster: .*kubeconfig"),
        (no_such_context, "no way to reach a cluster: .*prod"),
        (wrong_token, "401 Unauthorized; the token or certificate in the kubeconfig is wrong or has expired"),
        (another_authority, "is not the API server that the kubeconfig speaks of: .*certificate-authority-data"),
    ],
)
def test_a_way_that_is_none(
    cluster: Cluster, tmp_path: Path, spoil: Callable[[Config, Path], None], words: str
) -> None:
    path = tmp_path / "kubeconfig"
    config = json.loads(cluster.kubeconfig.read_text())
    path.write_text(json.dumps(config))
    spoil(config, path)
    with pytest.raises(SchedulerError, match=words):
        cluster.backend(kubeconfig=str(path)).snapshot([])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"domain_labels": {"rack": {"a": "b"}}}, "domain_labels: rack is {'a': 'b'}, expected text"),
        ({"pause_annotations": {"x/y": True}}, "pause_annotations: x/y is True, expected text; quote it"),
        ({"fact_expressions": {"model": "metadata[."}}, "fact_expressions: .* is no JMESPath expression"),
        ({"timeout": 0}, "timeout is 0; give a request some seconds"),
    ],
)
def test_an_option_that_makes_no_sense(cluster: Cluster, options: Config, words: str) -> None:
    with pytest.raises(SchedulerError, match=words):
        cluster.backend(**options)


Rights = list[tuple[str, str, list[str]]]


def all_but(rights: Any, resource: str, verb: str) -> Rights:
    left = [(group, what, [v for v in verbs if (what, v) != (resource, verb)]) for group, what, verbs in rights]
    return [(group, what, verbs) for group, what, verbs in left if verbs]


def said_by_snapshot(backend: Kubernetes, cluster: Cluster, node: str, pod: str) -> str:
    with pytest.raises(SchedulerError) as caught:
        backend.snapshot([])
    return str(caught.value)


def said_by_cordon(backend: Kubernetes, cluster: Cluster, node: str, pod: str) -> str:
    result = backend.cordon([node], RUN)[node]
    assert result.failed
    return result.msg


def said_by_evacuation(backend: Kubernetes, cluster: Cluster, node: str, pod: str) -> str:
    with pytest.raises(SchedulerError) as caught:
        evacuate(backend, [node], go(cluster, pod))
    return str(caught.value)


def said_of_steering(backend: Kubernetes, cluster: Cluster, node: str, pod: str) -> str:
    end, *dummy = evacuate(backend, [node], go(cluster, pod, to=(node,)), patience=1)[node].ends
    return end.reason


def said_by_validation(backend: Kubernetes, cluster: Cluster, node: str, pod: str) -> str:
    result = backend.validate([node], RUN, {}, 1)[node]
    assert result.failed
    return result.msg


@pytest.mark.parametrize(
    ("resource", "verb", "act"),
    [
        ("nodes", "list", said_by_snapshot),
        ("pods", "list", said_by_snapshot),
        ("nodes", "get", said_by_cordon),
        ("nodes", "patch", said_by_cordon),
        ("poddisruptionbudgets", "list", said_by_evacuation),
        ("pods/eviction", "create", said_by_evacuation),
        ("mutatingadmissionpolicies", "create", said_of_steering),
        ("pods", "create", said_by_validation),
        ("pods", "delete", said_by_validation),
    ],
)
def test_a_right_that_is_missing_is_named(
    cluster: Cluster, resource: str, verb: str, act: Callable[[Kubernetes, Cluster, str, str], str]
) -> None:
    (node,) = cluster.nodes(1)
    (pod,) = cluster.deployment("llama")
    own = cluster.account("almost", all_but(kubernetes.RIGHTS, resource, verb))
    said = act(cluster.backend(kubeconfig=str(own)), cluster, node, pod)
    assert f'cannot {verb} resource "{resource}"' in said


@pytest.mark.parametrize(("resource", "verb"), [("clusterpolicies", "patch"), ("pods", "delete"), ("nodes", "patch")])
def test_a_right_over_the_operator_that_is_missing_is_named(
    operated: OperatorCluster, resource: str, verb: str
) -> None:
    (node,) = operated.begin(1)
    operated.cordon(node)
    own = operated.account("almost", all_but(gpu_operator.RIGHTS, resource, verb))
    its = gpu_operator.GpuOperator(kubernetes_api.Api(str(own)), "run-1").swap([node], NEW, 4e9, 120)[node]
    assert its.failed and f'cannot {verb} resource "{resource}"' in its.msg and "kubernetes-rbac.yml" in its.msg
