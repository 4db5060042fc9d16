# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Print docs/kubernetes-rbac.yml: an account with exactly the rights that the collection's code names as its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import yaml

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import gpu_operator
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import (
    kubernetes,
    kubernetes_lease,
    node_maintenance,
)

NAME = NAMESPACE = "gpufleet"
HEAD = """\
# SPDX-License-Identifier: GPL-3.0-or-later
# The rights that gpufleet.driver needs in a cluster. Made by tests/lab/kubernetes/rbac.py from what the code calls.
# Apply it with: kubectl apply -f docs/kubernetes-rbac.yml
"""

Rights = Iterable[tuple[str, str, tuple[str, ...]]]


def merged(*parts: Rights) -> Rights:
    found: dict[tuple[str, str], set[str]] = {}
    for group, resource, verbs in itertools.chain(*parts):
        found.setdefault((group, resource), set()).update(verbs)
    return [(group, resource, tuple(sorted(verbs))) for (group, resource), verbs in found.items()]


RIGHTS: Rights = merged(kubernetes.RIGHTS, gpu_operator.RIGHTS, node_maintenance.RIGHTS, kubernetes_lease.RIGHTS)


def rules_of(group: str, resource: str, verbs: Iterable[str]) -> list[dict[str, Any]]:
    """Of Leases, which also say who leads in a cluster and which nodes live, only our own; a name cannot be asked for
    where one is made."""
    rule = {"apiGroups": [group], "resources": [resource]}
    if resource != "leases":
        return [{**rule, "verbs": list(verbs)}]
    own = [verb for verb in verbs if verb != "create"]
    return [{**rule, "verbs": ["create"]}, {**rule, "resourceNames": [kubernetes_lease.NAME], "verbs": own}]


def objects() -> list[dict[str, Any]]:
    meta = {"name": NAME}
    there = {"name": NAME, "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME}
    rules = [rule for group, resource, verbs in RIGHTS for rule in rules_of(group, resource, verbs)]
    kind = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": there},
        {"apiVersion": kind, "kind": "ClusterRole", "metadata": meta, "rules": rules},
        {
            "apiVersion": kind,
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", **there}],
        },
    ]


class _Dumper(yaml.SafeDumper):
    """Lists indented, short ones on one line: as people write them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def manifest() -> str:
    these = {"apiVersion": "v1", "kind": "List", "items": objects()}
    return HEAD + yaml.dump(
        these, Dumper=_Dumper, sort_keys=False, explicit_start=True, default_flow_style=None, width=110
    )


if __name__ == "__main__":
    print(manifest(), end="")
