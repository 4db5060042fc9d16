# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several nodes within one task: modules run, and bytes travel, over the connections that Ansible makes for each.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import become_loader, connection_loader

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact

_COLLECTION = "gpufleet.driver"
_TOGETHER = 4
"""Pieces of one file that travel in one command."""
PATIENCE = 900
"""Seconds that one such command may take, as on a store that has stopped answering."""
_LATE = (124, 137)

SAVING: Mapping[str, Any] = {
    "lock_timeout": {"type": "int", "default": 10},
    "freeze_limit": {"type": "int", "default": 900},
    "store": {"type": "path", "default": "/var/lib/gpufleet/store"},
    "criu": {"type": "str", "default": "criu"},
    "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
}
"""Options of every module that saves work of several nodes."""


class NodesAction(ActionBase):
    """An action that reaches several nodes, and leaves no files for its modules on any."""

    _nodes: Nodes | None = None

    def nodes(self, variables: Mapping[str, Any]) -> Nodes:
        """The nodes, by the variables of the task."""
        self._nodes = Nodes(self, variables)
        return self._nodes

    def cleanup(self, force: bool = False) -> None:
        if self._nodes:
            self._nodes.tidy()
        super().cleanup(force)


class Nodes:
    """The nodes as ``action``'s task reaches them. ``own`` is the one that it is for, or to which it is delegated."""

    def __init__(self, action: Any, variables: Mapping[str, Any]) -> None:
        self._action = action
        self._variables = variables
        self.own = str(action._task.delegate_to or variables.get("inventory_hostname"))
        self._connections: dict[str, Any] = {self.own: action._connection}
        self._silent: set[str] = set()

    def tidy(self) -> None:
        """Remove the directories for temporary files on the other nodes, as Ansible does on the task's own. One that
        has stopped answering keeps its own."""
        held = self._action._connection
        for name in self._connections.keys() - self._silent - {self.own}:
            self._action._connection = self._connections[name]
            with suppress(AnsibleConnectionFailure):
                self._action._remove_tmp_path(self._action._connection._shell.tmpdir)
        self._action._connection = held

    def _about(self, name: str) -> Any:
        if name not in self._variables["hostvars"]:
            raise AnsibleError(f"{name} is not in the inventory")
        return self._variables["hostvars"][name]

    def _connection(self, name: str) -> Any:
        if name not in self._connections:
            self._connections[name] = self._connect(self._about(name))
        return self._connections[name]

    def _connect(self, about: Any) -> Any:
        """A connection made as Ansible makes the one of a task."""
        task = self._action._task
        kind = str(about.get("ansible_connection") or task.connection or "ssh")
        connection = connection_loader.get("ssh" if kind == "smart" else kind, self._action._play_context.copy())
        if connection is None:
            raise AnsibleError(f"there is no connection plugin {kind}")
        keys = {key: value for key, value in task.dump_attrs().items() if key not in ("timeout", "retries")}

        def told(plugin_type: str, plugin: Any) -> dict[str, Any]:
            return {key: about[key] for key in C.config.get_plugin_vars(plugin_type, plugin._load_name) if key in about}

        connection.set_options(task_keys=keys, var_options=told("connection", connection))
        connection._shell.set_options(task_keys=keys, var_options=told("shell", connection._shell))
        if self._action._connection.become:
            become = become_loader.get(self._action._connection.become.name)
            become.set_options(task_keys=keys, var_options=told("become", become))
            connection.set_become_plugin(become)
        return connection

    def module(self, name: str, module: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Run a module of this collection on a node; its result, also if it failed.

        :raises AnsibleConnectionFailure: if the node does not answer.
        """
        variables = self._variables
        if name != self.own:
            about = self._about(name)
            variables = {key: about[key] for key in about if key.startswith(("ansible_", "inventory_"))}
            # where the task is delegated, Ansible looks for the interpreter there
            variables["ansible_delegated_vars"] = {self.own: variables.copy()}
        held, self._action._connection = self._action._connection, self._connection(name)
        try:
            return dict(
                self._action._execute_module(
                    module_name=f"{_COLLECTION}.{module}", module_args=dict(options), task_vars=variables
                )
            )
        except AnsibleConnectionFailure:
            self._silent.add(name)
            raise
        finally:
            self._action._connection = held

    def tell(self, name: str, argv: list[str], given: bytes = b"\n") -> bytes:
        """Standard output of a command on a node. Something is always given on standard input: without, Ansible's ssh
        takes a terminal, which would change the bytes. What comes back is memory of the work, with its secrets, and is
        not shown at any verbosity.

        :raises AnsibleError: if it fails, or does not end within :data:`PATIENCE`.
        """
        connection = self._connection(name)
        command = shlex.join(["timeout", "--kill-after=10", str(PATIENCE), *argv])
        if connection.become:
            command = connection.become.build_become_command(command, connection._shell)
        if getattr(connection, "allow_executable", True):
            command = f"/bin/sh -c {shlex.quote(command)}"
        context = connection._play_context
        shown, context.no_log = context.no_log, True
        try:
            rc, out, err = connection.exec_command(command, in_data=given, sudoable=True)
        finally:
            context.no_log = shown
        if rc in _LATE:
            raise AnsibleError(f"{name}: {shlex.join(argv)}: did not end within {PATIENCE} s; does its disk answer?")
        if rc:
            said = err.decode("utf-8", "replace").strip().splitlines()
            raise AnsibleError(f"{name}: {shlex.join(argv)}: rc {rc}" + (f": {said[-1]}" if said else ""))
        return bytes(out)

    def fetch(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Bring an artefact to a node (``checkpoint_fetch``): the pieces it does not have yet, a few at a time."""
        source, wanted = str(options["source"]), str(options["artefact"])
        store = str(artefact.place(str(options.get("source_store") or options["store"]), wanted))
        manifest = self.tell(source, ["cat", f"{store}/{artefact.MANIFEST}"]).decode()
        try:
            said = json.loads(manifest)
        except ValueError as exc:
            raise AnsibleError(f"{source}: the manifest of {wanted} is damaged: {exc}") from exc
        given = {**options, "manifest": manifest}
        told = self.module(name, "checkpoint_fetch", given)
        if told.get("failed") or self._action._task.check_mode:
            return told
        sizes = {str(file["path"]): int(file["size"]) for file in said["files"]}
        small, large = parted(told["missing"], sizes)
        for names in small:
            data = self.tell(source, ["tar", "-C", store, "-cf", "-", "--", *names])
            self.tell(name, ["tar", "-C", str(told["staged"]), "--no-same-owner", "-xf", "-"], data)
        for path, first, count in runs(large):
            start, size = first * artefact.PIECE >> 20, count * artefact.PIECE >> 20
            how = ["bs=1M", "iflag=fullblock", "status=none"]
            data = self.tell(source, ["dd", f"if={store}/{path}", f"skip={start}", f"count={size}", *how])
            if data:
                self.tell(name, ["dd", f"of={told['staged']}/{path}", f"seek={start}", "conv=notrunc", *how], data)
        done = self.module(name, "checkpoint_fetch", {**given, "finish": True})
        return {**done, "moved_pieces": len(told["missing"])}


def parted(missing: Iterable[Iterable[Any]], sizes: Mapping[str, int]) -> tuple[list[list[str]], list[tuple[str, int]]]:
    """Missing pieces told apart: names of files of one piece, to travel together as long as they are no more than a few
    pieces in all, and the pieces of larger files."""
    small: list[list[str]] = []
    large: list[tuple[str, int]] = []
    room = 0
    for path, index in sorted((str(path), int(index)) for path, index in missing):
        if sizes[path] > artefact.PIECE:
            large.append((path, index))
            continue
        room -= sizes[path]
        if room < 0 or not small:
            small.append([])
            room = _TOGETHER * artefact.PIECE - sizes[path]
        small[-1].append(path)
    return small, large


def runs(missing: Iterable[Iterable[Any]]) -> list[tuple[str, int, int]]:
    """Neighbouring pieces of a file as path, first and count, at most a few at a time."""
    found: list[tuple[str, int, int]] = []
    for path, index in sorted((str(path), int(index)) for path, index in missing):
        if found:
            last, first, count = found[-1]
            if last == path and first + count == index and count < _TOGETHER:
                found[-1] = (path, first, count + 1)
                continue
        found.append((path, index, 1))
    return found
