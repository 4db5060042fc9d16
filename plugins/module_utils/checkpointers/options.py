# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the modules about saves have in common: their options, their workers, the shape of what they return.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_UNKNOWN,
    CheckpointError,
    Reason,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cedana import Cedana
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Differences, Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.engine import KINDS
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.hook import Hook
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.kubelet import Kubelet
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.left_running import LeftRunning
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.sealed import SCRATCH, TOOLS

BACKENDS = ("cuda_criu", "hook", "cedana", "kubelet")

ENGINE: Mapping[str, Any] = {
    "kind": {"type": "str", "choices": list(KINDS), "required": True},
    "url": {"type": "str", "default": "http://127.0.0.1:8000"},
    "drain": {"type": "int", "default": 60},
    "sleep": {"type": "bool", "default": False},
    "token_file": {"type": "path", "no_log": False},
}
ENCRYPT: Mapping[str, Any] = {
    "tool": {"type": "str", "choices": list(TOOLS), "default": "age"},
    "recipient": {"type": "str", "required": True},
    "identity": {"type": "path"},
    "scratch": {"type": "path", "default": SCRATCH},
}
CEDANA: Mapping[str, Any] = {
    "url": {"type": "str"},
    "token_file": {"type": "path", "no_log": False},
    "ca": {"type": "path"},
    "cluster": {"type": "str"},
    "namespace": {"type": "str", "default": "default"},
    "pod": {"type": "str"},
    "runc_root": {"type": "path", "default": "/run/containerd/runc/k8s.io"},
    "slurm_job": {"type": "str"},
    "kind": {"type": "str", "choices": ["simple", "rootfs", "rootfsonly"], "default": "simple"},
    "job": {"type": "str"},
}
KUBELET: Mapping[str, Any] = {
    "namespace": {"type": "str", "required": True},
    "pod": {"type": "str", "required": True},
    "container": {"type": "str", "required": True},
    "url": {"type": "str", "default": "https://127.0.0.1:10250"},
    "ca": {"type": "path"},
    "token_file": {"type": "path", "no_log": False},
    "cert": {"type": "path"},
    "key": {"type": "path", "no_log": False},
    "folder": {"type": "path", "default": "/var/lib/kubelet/checkpoints"},
    "runtime": {"type": "str"},
    "runtime_config": {"type": "path", "default": "/etc/containerd/config.toml"},
}
_TEXTS = {"type": "list", "elements": "str"}
SAVE: Mapping[str, Any] = {
    "backend": {"type": "str", "choices": list(BACKENDS), "default": "cuda_criu"},
    "paths": {"type": "list", "elements": "path", "default": []},
    "progress": {**_TEXTS, "default": []},
    "key": {"type": "dict", "default": {}, "no_log": False},
    "may_repeat": {"type": "bool", "default": False},
    "cedana": {"type": "dict", "options": dict(CEDANA)},
    "kubelet": {"type": "dict", "options": dict(KUBELET)},
    "encrypt": {"type": "dict", "options": dict(ENCRYPT)},
    "engine": {"type": "dict", "options": dict(ENGINE)},
    "keep": {"type": "int", "default": 604800},
    "command": _TEXTS,
    "signal": {"type": "str"},
    "http": {"type": "str"},
    "proof": {"type": "str"},
    "check": _TEXTS,
    "deadline": {"type": "int", "default": 300},
}
ARGUMENTS: Mapping[str, Any] = {
    "workloads": {
        "type": "list",
        "elements": "dict",
        "required": True,
        "options": {
            "name": {"type": "str", "required": True},
            "unit": {"type": "str"},
            "container": {"type": "str"},
            "engine": {"type": "str", "choices": ["podman", "docker"], "default": "podman"},
            "artefact": {"type": "str"},
            "digest": {"type": "str"},
            "ready": {**_TEXTS, "default": []},
            "ready_timeout": {"type": "int", "default": 120},
            "save": {"type": "dict", "default": {}, "options": dict(SAVE), "apply_defaults": True},
        },
    },
    "gang": {"type": "bool", "default": False},
    "concurrency": {"type": "int", "default": 4},
    "store": {"type": "path", "default": "/var/lib/gpufleet/store"},
    "criu": {"type": "str", "default": "criu"},
    "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
}


def work_of(given: Mapping[str, Any]) -> Work:
    """A workload from the module's option."""
    paths = [os.path.normpath(path) for path in given["save"].get("paths") or ()]
    return Work(
        given["name"],
        given["unit"],
        {**given["save"], "paths": paths},
        tuple(given["ready"]),
        float(given["ready_timeout"]),
        given["container"],
        given["engine"],
    )


_ON_NODES: Mapping[str, type[CudaCriu] | type[LeftRunning]] = {one.name: one for one in (CudaCriu, Cedana, Kubelet)}


def backend(
    name: str,
    params: Mapping[str, Any],
    limits: Limits,
    say: Callable[[str], None],
    differences: Differences | None = None,
) -> CudaCriu | LeftRunning | Hook:
    """The checkpointer of that name, as a module's parameters want it."""
    if name == Hook.name:
        return Hook(execution.run)
    return _ON_NODES[name](
        execution.run,
        params["state_dir"],
        params["store"],
        node=params.get("node") or "",
        criu=params["criu"],
        limits=limits,
        differences=differences,
        say=say,
    )


Act = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def each(workloads: Sequence[Mapping[str, Any]], act: Act, concurrency: int) -> list[dict[str, Any]]:
    """``act`` on every workload, at most ``concurrency`` at a time; what became of each, in the order given."""

    def one(given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"workload": given["name"], "ok": True, "reason": None, **act(given)}
        except CheckpointError as exc:
            return {
                "workload": given["name"],
                "ok": False,
                "changed": False,
                "source": exc.reason.source,
                "reason": exc.reason.as_dict(),
                "msg": str(exc),
            }
        except Exception as exc:  # one workload's surprise must not hide what became of the others
            odd = f"{type(exc).__name__}: {exc}"
            reason = Reason("policy", "module", odd, "no surprise", "journalctl -b", SOURCE_UNKNOWN, given["name"])
            return {
                "workload": given["name"],
                "ok": False,
                "changed": True,
                "source": reason.source,
                "reason": reason.as_dict(),
                "msg": str(reason),
            }

    with ThreadPoolExecutor(max_workers=max(1, min(concurrency, len(workloads)))) as pool:
        return list(pool.map(one, workloads))


def end_gang(
    results: Sequence[dict[str, Any]], workloads: Sequence[Mapping[str, Any]], end: Act, concurrency: int
) -> None:
    """A half restored gang is worse than none: have every member end that came back, and say of each how it is."""
    back = [given for one, given in zip(results, workloads) if one["ok"]]
    ended = {one["workload"]: one for one in each(back, end, concurrency)} if back else {}
    for one in results:
        told = ended.get(one["workload"])
        if one["ok"] and told:
            how = "ended again" if told["ok"] else f"not ended ({told['msg']})"
            one.update(ok=False, reason=told["reason"], msg=f"{how}, for its gang was not restored")


def missing_artefact(workloads: Sequence[Mapping[str, Any]]) -> str:
    """What to say if a workload names no save although the act is about one; empty if all do."""
    without = [given["name"] for given in workloads if not given["artefact"]]
    return f"no artefact is named for {', '.join(without)}; workload_checkpoint returned it" if without else ""
