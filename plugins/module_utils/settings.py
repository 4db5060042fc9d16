# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What may be set for a run, and what is wrong with what is set.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

_OF_TYPE = ("type", "elements", "choices", "options", "required_one_of")
"""What of an option is checked before anything is touched; whether it is required is for its role to say."""

_EMPTY = {"list": " ([] for none)", "dict": " ({} for none)", "str": " ('' for none)", "path": " ('' for none)"}

_PLAIN = re.compile(r"\w[\w.:-]*\Z")


def of_roles(specs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of all roles as one argument spec, from the content of their ``meta/argument_specs.yml``."""
    return {
        name: {key: option[key] for key in _OF_TYPE if key in option}
        for spec in specs
        for name, option in spec["argument_specs"]["main"]["options"].items()
    }


def wrong(values: Mapping[str, Any], spec: Mapping[str, Any], node: str) -> list[str]:
    """What of the settings has the wrong type, or the right one and yet no sense; a sentence each.

    :param values: those that are set, by name
    :param spec: their argument spec, as of :func:`of_roles`
    :param node: the name the inventory has for the node
    """
    nothing = [name for name, value in values.items() if value is None]
    texts = [name for name, value in values.items() if isinstance(value, str) and spec[name].get("elements") == "dict"]
    rest = {name: value for name, value in values.items() if name not in (*nothing, *texts)}
    checked = ArgumentSpecValidator({name: dict(spec[name]) for name in rest}).validate(plain(rest))
    found = [
        f"{name} is null: give it a value{_EMPTY.get(spec[name]['type'], '')}, or leave it out" for name in nothing
    ]
    found += [f"{name} is text and not a list: give it as JSON, -e '{{\"{name}\": [...]}}'" for name in texts]
    found += checked.error_messages
    if not _PLAIN.match(node):
        found.append(
            f"the inventory calls it '{node}', which a command line would misread; "
            f"expected letters, digits, _ . : and -, not - at the beginning"
        )
    found += [
        f"{name} is {value}, expected 0 or more"
        for name, value in checked.validated_parameters.items()
        if isinstance(value, (int, float)) and value < 0
    ]
    state_dir = str(values.get("gpu_state_dir") or "/")
    if not state_dir.startswith("/"):
        found.append(f"gpu_state_dir is '{state_dir}', expected an absolute path")
    return found


def plain(value: Any) -> Any:
    """The same without what Ansible keeps about each value, which the validator would copy again and again."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, str) else value


def misspelt(names: Iterable[str], known: Iterable[str], own: str | Iterable[str] = ()) -> list[str]:
    """Of ``names``, those that are not known but nearly so: ``gpu_canery (did you mean gpu_canary?)``.

    :param own: names that somebody else has given to variables of theirs; a text has commas between them
    """
    right = sorted(known)
    theirs = {name.strip() for name in (own.split(",") if isinstance(own, str) else own)}
    unknown = sorted(set(names) - set(right) - theirs)
    near = ((name, get_close_matches(name, right, 1, 0.85)) for name in unknown)
    return [f"{name} (did you mean {close[0]}?)" for name, close in near if close]
