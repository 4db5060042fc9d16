# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plain machines, on which no scheduler places work.

Out of service may still mean something, to a load balancer or a monitor; commands given by the user say what. Whose
doing it was is kept in a file on the machine where this runs; nodes whose own journal says so can be named besides.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import statefile
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Node, Snapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import (
    Evacuated,
    Fate,
    Mark,
    NodeResult,
    Scheduler,
    SchedulerError,
    State,
)

FILE, SCHEMA = "cordons.json", 1

_IN_SERVICE, _OUT_OF_SERVICE = 0, 1


class _NodeError(Exception):
    """This node cannot be dealt with."""


class Hosts(Scheduler):
    """Cordons by ``cordon_command`` and ``uncordon_command``, argument lists in which ``{node}`` stands for the name.

    ``state_command`` exits with 0 if the node is in service and 1 if it is out of service. Without commands a node is
    out of service if it is marked, and that is all there is to it. Each command has ``timeout`` seconds; at most
    ``workers`` nodes are dealt with at a time. Nodes in ``ours`` count as marked.
    """

    def __init__(
        self,
        run: Runner,
        state_dir: str,
        ours: Collection[str] = (),
        cordon_command: Sequence[str] | None = None,
        uncordon_command: Sequence[str] | None = None,
        state_command: Sequence[str] | None = None,
        timeout: float = 60,
        workers: int = 16,
    ) -> None:
        if bool(cordon_command) != bool(uncordon_command):
            raise SchedulerError("cordon_command and uncordon_command belong together; only one of them was given")
        commands = {"cordon": cordon_command, "uncordon": uncordon_command, "state": state_command}
        for name, command in commands.items():
            if command and not any("{node}" in word for word in command):
                raise SchedulerError(f"{name}_command does not say {{node}}, where the name of the node is to stand")
        self._run = run
        self._path = Path(state_dir) / FILE
        self._ours = set(ours)
        self._cordon, self._uncordon, self._state = cordon_command, uncordon_command, state_command
        self._timeout = timeout
        self._workers = workers

    def snapshot(self, names: Sequence[str]) -> Snapshot:
        """Nobody places work on plain machines, so nobody else knows of any."""
        return Snapshot(nodes=tuple(Node(name) for name in dict.fromkeys(names)))

    def cordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        return self._each(nodes, lambda node: self._take_out(node, mark, check))

    def evacuate(
        self,
        nodes: Sequence[str],
        mark: Mark,
        fates: Sequence[Fate],
        deadline: float,
        patience: float,
        check: bool = False,
    ) -> dict[str, Evacuated]:
        """Nothing: the machines' own work is the module ``host_workloads``'s."""
        return {node: Evacuated() for node in nodes}

    def validate(
        self, nodes: Sequence[str], mark: Mark, gpus: Mapping[str, int], timeout: float, check: bool = False
    ) -> dict[str, NodeResult]:
        """Nothing beyond what the module ``driver_validate`` proves on the machine itself."""
        return self._each(nodes, self._as_it_is)

    def uncordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        return self._each(nodes, lambda node: self._put_back(node, check))

    def settle(self, mark: Mark, check: bool = False) -> list[str]:
        return []

    def _each(self, nodes: Sequence[str], act: Callable[[str], NodeResult]) -> dict[str, NodeResult]:
        self._marks()  # a file that cannot be read is everybody's trouble, not the first node's

        def one(node: str) -> NodeResult:
            try:
                return act(node)
            except (_NodeError, statefile.StateFileError) as exc:
                return NodeResult(None, None, failed=True, msg=f"{node}: {exc}")

        distinct = list(dict.fromkeys(nodes))
        with ThreadPoolExecutor(max_workers=max(1, min(self._workers, len(distinct)))) as pool:
            return dict(zip(distinct, pool.map(one, distinct)))

    def _as_it_is(self, node: str) -> NodeResult:
        state = self._look(node)
        return NodeResult(state, state)

    def _take_out(self, node: str, mark: Mark, check: bool) -> NodeResult:
        before = self._look(node)
        if before.cordoned and not before.ours:
            return NodeResult(before, before, msg=f"{node} was out of service before; it will be left so")
        wanted = State(True, True, mark.run_id)
        if before == wanted:
            return NodeResult(before, before)
        if check:
            return NodeResult(before, wanted, changed=True)
        # the mark comes first: a crash between the two must not make our own doing look like somebody else's
        self._set_mark(node, {"run_id": mark.run_id, "at": mark.at})
        if not before.cordoned:
            said = self._tell(self._cordon, node)
            out = self._is_out(node) if self._state else said is None or said.ok
            if not out:
                self._set_mark(node, None)
                raise _NodeError(_refused(said, "it is still in service"))
        return NodeResult(before, wanted, changed=True)

    def _put_back(self, node: str, check: bool) -> NodeResult:
        before = self._look(node)
        marked = node in self._marks()
        if not marked:
            left = f"{node} was not taken out of service by this collection; it is left as it is"
            return NodeResult(before, before, msg=left if before.cordoned else "")
        wanted = State(False)
        if check:
            return NodeResult(before, wanted, changed=True)
        if before.cordoned:
            said = self._tell(self._uncordon, node)
            out = self._is_out(node) if self._state else said is not None and not said.ok
            if out:
                raise _NodeError(_refused(said, "it is still out of service"))
        self._set_mark(node, None)
        return NodeResult(before, wanted, changed=True)

    def _look(self, node: str) -> State:
        mark = self._marks().get(node)
        run_id = str(mark["run_id"]) if mark else None
        if self._is_out(node) if self._state else mark is not None:
            return State(True, mark is not None, run_id)
        return State(False)

    def _is_out(self, node: str) -> bool:
        said = self._tell(self._state, node)
        if said is None or said.rc not in (_IN_SERVICE, _OUT_OF_SERVICE):
            found = said.describe() if said else "no state_command"
            raise _NodeError(f"cannot tell whether it is in service ({found}); expected exit status 0 (in) or 1 (out)")
        return said.rc == _OUT_OF_SERVICE

    def _tell(self, command: Sequence[str] | None, node: str) -> Completed | None:
        if not command:
            return None
        return self._run([word.replace("{node}", node) for word in command], timeout=self._timeout)

    def _marks(self) -> dict[str, Any]:
        nodes = statefile.read(self._path, SCHEMA).get("nodes", {})
        if not isinstance(nodes, dict) or not all(isinstance(m, dict) and "run_id" in m for m in nodes.values()):
            raise SchedulerError(
                f"{self._path} does not say which run took which node out of service; see which nodes are out, "
                f"then move it away: mv {self._path} {self._path}.bad"
            )
        elsewhere = {node: {"run_id": "of its journal"} for node in self._ours - nodes.keys()}
        return {**nodes, **elsewhere}

    def _set_mark(self, node: str, mark: dict[str, Any] | None) -> None:
        with statefile.locked(self._path, SCHEMA) as (content, save):
            nodes = {name: kept for name, kept in content.get("nodes", {}).items() if name != node}
            save({"nodes": {**nodes, **({node: mark} if mark else {})}})
        self._ours.discard(node)


def _refused(said: Completed | None, found: str) -> str:
    return f"{said.describe()}, and {found}; run that command by hand" if said else f"there is no command, and {found}"
