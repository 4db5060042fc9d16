# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ClusterPolicy and NVIDIADriver in the shape of NVIDIA's: what an upgrade touches is typed, the rest is let in."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OPEN: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def fields(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def flag(default: bool) -> Schema:
    return {**FLAG, "default": default}


def count(default: int) -> Schema:
    return {**COUNT, "default": default}


POLICY = fields(
    autoUpgrade=flag(False),
    maxParallelUpgrades=count(1),
    maxUnavailable={"x-kubernetes-int-or-string": True, "default": "25%"},
    waitForCompletion=fields(podSelector=TEXT, timeoutSeconds=count(0)),
    podDeletion=fields(force=flag(False), timeoutSeconds=count(300), deleteEmptyDir=flag(False)),
    drain=fields(
        enable=flag(False), force=flag(False), podSelector=TEXT, timeoutSeconds=count(300), deleteEmptyDir=flag(False)
    ),
)
MANAGER = fields(
    env={"type": "array", "items": fields(name=TEXT, value=TEXT)}, image=TEXT, repository=TEXT, version=TEXT
)
MODULE_TYPE: Schema = {"type": "string", "enum": ["auto", "open", "proprietary"], "default": "auto"}


def fixed(schema: Schema, name: str) -> Schema:
    rule = {"rule": "self == oldSelf", "message": f"{name} is an immutable field. Please create a new NvidiaDriver."}
    return {**schema, "x-kubernetes-validations": [rule]}


CLUSTER_POLICY_SPEC = fields(
    driver=fields(
        enabled=flag(True),
        useNvidiaDriverCRD=flag(False),
        usePrecompiled=flag(False),
        kernelModuleType=MODULE_TYPE,
        repository=TEXT,
        image=TEXT,
        version=TEXT,
        upgradePolicy=POLICY,
        manager=MANAGER,
        imagePullSecrets={"type": "array", "items": TEXT},
    ),
    sandboxWorkloads=fields(enabled=flag(False)),
    mig=fields(strategy=TEXT),
    **{part: fields(enabled=FLAG) for part in ("devicePlugin", "toolkit", "dcgm", "migManager", "gds", "gdrcopy")},
)
NVIDIA_DRIVER_SPEC = fields(
    driverType=fixed({**TEXT, "enum": ["gpu", "vgpu", "vgpu-host-manager"], "default": "gpu"}, "driverType"),
    usePrecompiled=fixed(FLAG, "usePrecompiled"),
    kernelModuleType=MODULE_TYPE,
    default=FLAG,
    repository=TEXT,
    image={**TEXT, "default": "nvcr.io/nvidia/driver"},
    version=TEXT,
    nodeSelector=TEXTS,
    nodeAffinity=OPEN,
    tolerations={"type": "array", "items": OPEN},
    upgradePolicy=POLICY,
    manager=MANAGER,
    imagePullSecrets={"type": "array", "items": TEXT},
    labels=TEXTS,
    annotations=TEXTS,
)
NVIDIA_DRIVER_SPEC["required"] = ["driverType", "image"]


def definition(kind: str, plural: str, version: str, spec: Schema, short: list[str], states: list[str]) -> Schema:
    status = fields(
        state={**TEXT, "enum": states}, namespace=TEXT, conditions={"type": "array", "items": OPEN}
    )  # no more is served
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.nvidia.com"},
        "spec": {
            "group": "nvidia.com",
            "scope": "Cluster",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": short,
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": fields(apiVersion=TEXT, kind=TEXT, spec=spec, status=status)},
                }
            ],
        },
    }


DEFINITIONS = (
    definition("ClusterPolicy", "clusterpolicies", "v1", CLUSTER_POLICY_SPEC, [], ["ignored", "ready", "notReady"]),
    definition(
        "NVIDIADriver",
        "nvidiadrivers",
        "v1alpha1",
        NVIDIA_DRIVER_SPEC,
        ["nvd", "nvdriver", "nvdrivers"],
        ["ignored", "ready", "notReady", "disabled"],
    ),
)
