# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compatibility facts that a pod carries with it: images, inference or training engine, model.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Facts

Object = Mapping[str, Any]

_ENGINES = (
    ("vllm", re.compile(r"\bvllm\b|vllm-openai")),
    ("sglang", re.compile(r"\bsglang\b")),
    ("triton", re.compile(r"tritonserver")),
    ("tgi", re.compile(r"text-generation-inference")),
    ("nim", re.compile(r"(^|/)nim/")),
    ("pytorch", re.compile(r"torchrun|pytorch|torch\.distributed")),
)
_MODEL_FLAGS = {
    "vllm": ("--model", "--served-model-name"),
    "sglang": ("--model-path", "--model"),
    "tgi": ("--model-id",),
    "triton": ("--model-repository", "--model-store"),
}
_MODEL_VARIABLES = ("MODEL_ID", "NIM_MODEL_NAME", "HF_MODEL_ID", "MODEL_NAME", "MODEL")
_REVISION_FLAGS = ("--revision",)
_REVISION_VARIABLES = ("REVISION", "MODEL_REVISION")


def workload_facts(pod: Object, expressions: Mapping[str, str]) -> Facts:
    """Compatibility facts that the workload carries with it: image digests, engine and version, model and revision.

    ``expressions`` name facts by JMESPath over the pod and count more than what is recognised by itself.

    :raises ValueError: if an expression is none; ImportError without the package jmespath.
    """
    spec, status = pod["spec"], pod.get("status") or {}
    running = {each["name"]: each.get("imageID") or "" for each in status.get("containerStatuses") or ()}
    facts: dict[str, Any] = {}
    images = []
    for container in spec.get("containers") or ():
        image = running.get(container["name"]) or container.get("image", "")
        images.append(image.rpartition("@")[2] if "@sha256:" in image else image)
    facts["image"] = images[0] if len(images) == 1 else tuple(sorted(images))
    for container in spec.get("containers") or ():
        found = _engine_facts(container)
        if found:
            facts.update(found)
            break
    for name, text in expressions.items():
        value = _said(text, pod)
        if isinstance(value, (str, int, float)):
            facts[name] = value
        elif isinstance(value, list) and all(isinstance(each, str) for each in value):
            facts[name] = tuple(sorted(value))
    return tuple(sorted(facts.items()))


def _said(text: str, pod: Object) -> Any:
    from jmespath.exceptions import JMESPathError  # type: ignore[import-untyped]

    try:
        return expression(text).search(pod)
    except JMESPathError:  # a function that does not take what this pod has there
        return None


@lru_cache(maxsize=64)
def expression(text: str) -> Any:
    """A JMESPath expression, to search pods with.

    :raises ValueError: if it is none; ImportError without the package jmespath.
    """
    import jmespath  # type: ignore[import-untyped]
    from jmespath.exceptions import JMESPathError

    try:
        return jmespath.compile(text)
    except JMESPathError as exc:
        raise ValueError(f"{text!r} is no JMESPath expression: {' '.join(str(exc).split())}") from exc


def _engine_facts(container: Object) -> dict[str, str]:
    image = container.get("image", "")
    words = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
    if len(words) == 1 or (len(words) > 1 and words[1] == "-c"):
        words = [*words[:-1], *words[-1].split()]
    engine = None
    for text in (image.rpartition("@")[0] or image, " ".join(words)):
        engine = next((name for name, pattern in _ENGINES if pattern.search(text)), None)
        if engine:
            break
    if engine is None:
        return {}
    facts = {"engine": engine}
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    if tag:
        facts["engine_version"] = tag
    given = {each["name"]: each["value"] for each in container.get("env") or () if each.get("value")}
    model = _flag(words, _MODEL_FLAGS.get(engine, ())) or _variable(given, _MODEL_VARIABLES)
    if not model and engine == "vllm" and "serve" in words[:-1]:
        model = words[words.index("serve") + 1]
    if model:
        facts["model"] = model
    revision = _flag(words, _REVISION_FLAGS) or _variable(given, _REVISION_VARIABLES)
    if revision:
        facts["model_revision"] = revision
    return facts


def _flag(words: Sequence[str], names: Sequence[str]) -> str | None:
    for name in names:
        for index, word in enumerate(words):
            if word == name and index + 1 < len(words):
                return words[index + 1]
            if word.startswith(name + "="):
                return word[len(name) + 1 :]
    return None


def _variable(given: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((given[name] for name in names if name in given), None)
