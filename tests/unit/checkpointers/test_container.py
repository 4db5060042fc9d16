# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What podman is asked about a container that is to move, and what its answers mean. Podman is stood in for here; in
tests/integration/moves/test_containers.py it is real."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError, Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.container import Podman
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import ServiceError
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed

PLAIN: dict[str, Any] = {
    "Id": "abc",
    "Image": "2300903b0361aa",
    "ImageName": "localhost/base:1",
    "OCIRuntime": "runc",
    "State": {"Running": True, "Pid": 4711, "CgroupPath": "/machine.slice/libpod-abc.scope"},
    "Config": {"Labels": None},
    "HostConfig": {"AutoRemove": False, "PidMode": "private", "RestartPolicy": {"Name": "", "MaximumRetryCount": 0}},
    "Mounts": [
        {"Type": "bind", "Source": "/etc"},
        {"Type": "volume", "Name": "data", "Source": "/var/lib/containers/x"},
    ],
    "NetworkSettings": {"Networks": {"podman": {}}},
}


class Engine:
    """Containers by name, as ``podman`` has them."""

    def __init__(self, **containers: dict[str, Any]) -> None:
        self.containers = containers
        self.has = {"2300903b0361aa", "data", "podman"}
        self.at_boot = False
        self.saves = True
        self.broken = ""
        self.printed = ""

    def run(self, argv: Sequence[str], **dummy: Any) -> Completed:
        def said(rc: int, out: str = "", err: str = "") -> Completed:
            return Completed(tuple(argv), rc, out, err, 0.1)

        words = list(argv[1:])
        if argv[0] == "systemctl":
            return said(0 if self.at_boot else 1)
        if argv[1] == "checkpoint":
            return said(0 if self.saves else 1)
        if self.broken:
            return said(125, "", self.broken)
        if words[:2] == ["container", "inspect"]:
            if words[2] not in self.containers:
                return said(125, "[]", f'Error: inspecting object: no such container "{words[2]}"')
            return said(0, self.printed or json.dumps([self.containers[words[2]]]))
        if words[0] == "rename":
            if words[2] in self.containers or words[1] not in self.containers:
                return said(125, "", "Error: no such container, or the name is in use")
            self.containers[words[2]] = self.containers.pop(words[1])
            return said(0)
        if words[1] == "exists":
            return said(0 if words[2] in self.has else 1)
        return said(0)

    def box(self) -> Podman:
        return Podman(self.run, "podman:notebook")


def but(**changes: Any) -> dict[str, Any]:
    return {**PLAIN, **changes}


def host(**changes: Any) -> dict[str, Any]:
    return but(HostConfig={**PLAIN["HostConfig"], **changes})


REFUSED = {
    "nothing": (PLAIN, False, []),
    "of-a-unit": (but(Config={"Labels": {"PODMAN_SYSTEMD_UNIT": "x.service"}}), False, ["container_of_unit"]),
    "rm": (host(AutoRemove=True), False, ["auto_remove"]),
    "pids-of-the-host": (host(PidMode="host"), False, ["pid_namespace"]),
    "pod": (but(Pod="f00ba4f00ba4f00ba4"), False, ["pod"]),
    "starts-at-boot": (host(RestartPolicy={"Name": "always"}), True, ["restart_policy"]),
    "would-but-nobody-starts-it": (host(RestartPolicy={"Name": "always"}), False, []),
    "on-failure": (host(RestartPolicy={"Name": "on-failure"}), True, []),
}


@pytest.mark.parametrize(("about", "at_boot", "features"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_move_is_refused_by_name(about: dict[str, Any], at_boot: bool, features: list[str]) -> None:
    engine = Engine(notebook=about)
    engine.at_boot = at_boot
    assert [feature for feature, seen, look in engine.box().refusals()] == features


def test_a_runtime_that_cannot_save_is_refused_before_anything_is_touched() -> None:
    engine = Engine(notebook=but(OCIRuntime="crun"))
    engine.saves = False
    assert engine.box().refusals() == [
        ("oci_runtime", "it is run by crun, which cannot save it here", "crun --version")
    ]


@pytest.mark.parametrize(
    ("said", "log"),
    [
        (r'level=error msg="criu failed: type NOTIFY errno 0\nlog file: /x/dump.log"', Path("/x/dump.log")),
        ("Error: runc: criu failed: type NOTIFY errno 0\nlog file: /x/restore.log\n", Path("/x/restore.log")),
        ("Error: no such container", None),
    ],
    ids=["dump", "restore", "another"],
)
def test_the_log_of_criu_is_the_one_that_runc_names(said: str, log: Path | None) -> None:
    assert Engine().box().criu_log(Completed(("podman",), 125, "", said, 0.1)) == log


@pytest.mark.parametrize("name", ["", "-it", "a b", "../x", "a;b", "podman:x"])
def test_a_name_that_is_none_reaches_no_command(name: str) -> None:
    with pytest.raises(ServiceError, match="not the name"):
        Podman(Engine().run, f"podman:{name}")


def test_a_container_is_seen_as_a_service_is() -> None:
    assert Engine(notebook=PLAIN).box().show() == {
        "LoadState": "loaded",
        "ActiveState": "active",
        "MainPID": "4711",
        "ControlGroup": "/machine.slice/libpod-abc.scope",
    }
    assert Engine().box().show()["LoadState"] == "not-found"


@pytest.mark.parametrize("printed", ["", "not json", "[]", "[1, 2]"])
def test_an_engine_that_does_not_answer_is_no_missing_container(printed: str) -> None:
    engine = Engine(notebook=PLAIN)
    engine.printed = printed
    engine.broken = "" if printed else "Error: cannot connect"
    with pytest.raises(ServiceError):
        engine.box().show()


def test_it_waits_under_another_name_until_it_is_home() -> None:
    engine = Engine(notebook=PLAIN)
    engine.box().moved.place(["podman:notebook"])
    assert list(engine.containers) == ["notebook-moved-by-gpufleet"]
    engine.box().moved.place(["podman:notebook"])  # an interrupted end is repeated
    assert engine.box().moved.lift_one("podman:notebook")
    assert list(engine.containers) == ["notebook"]
    assert not engine.box().moved.lift_one("podman:notebook")


def test_a_name_that_somebody_took_meanwhile_is_told() -> None:
    engine = Engine(notebook=PLAIN)
    engine.box().moved.place(["podman:notebook"])
    engine.containers["notebook"] = PLAIN
    with pytest.raises(ServiceError, match="could not be given its name again"):
        engine.box().moved.lift_one("podman:notebook")


def test_what_it_needs_must_be_on_the_target(tmp_path: Path) -> None:
    source = Engine(notebook=PLAIN).box()
    wanted = source.image()
    assert wanted["mounts"] == ["/etc"]
    target = Engine()
    assert target.box().lacks(wanted, []) == ""
    more = {**wanted, "mounts": ["/etc", "/nonexistent/data"]}
    assert target.box().lacks(more, ["/nonexistent/dat"]) == "/nonexistent/data, which it mounts, is not here"
    assert target.box().lacks(more, ["/nonexistent"]) == "", "it comes with the save"
    target.saves = False
    assert target.box().lacks(wanted, []) == "runc, which ran it, is not here or cannot restore it"
    target.saves = True
    for lost, told in (("podman", "there is no network podman here"), ("data", "there is no volume data here")):
        target.has.remove(lost)
        assert target.box().lacks(wanted, []) == told
    target.has.clear()
    assert target.box().lacks(wanted, []) == "image localhost/base:1 (2300903b0361) is not here"


KINDS = {
    "docker": (Work("w", container="notebook", engine="docker"), "unsupported_feature:kind"),
    "nothing": (Work("w"), "unsupported_feature:kind"),
    "a-bad-name": (Work("w", container="-it"), "unsupported_backend"),
    "none-there": (Work("w", container="other"), "lost_source"),
}


@pytest.mark.parametrize(("work", "reason"), KINDS.values(), ids=KINDS)
def test_a_declaration_that_cannot_work_is_refused(tmp_path: Path, work: Work, reason: str) -> None:
    backend = CudaCriu(Engine(notebook=PLAIN).run, str(tmp_path / "state"), str(tmp_path / "store"))
    assert [one.reason for one in backend.check(work)] == [reason]
    with pytest.raises(CheckpointError):
        backend.capture(work)


@pytest.mark.parametrize(("reused", "stopped"), [(0, True), (1, False)])
def test_who_took_the_pid_of_a_process_that_ended_is_not_stopped(tmp_path: Path, reused: int, stopped: bool) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        start = suspend.start_of(process.pid)
        assert start
        Podman(Engine().run, "podman:box").dump([{"pid": process.pid, "start": start - reused}], tmp_path / "i", 1)
        if stopped:
            while not suspend.stands_still(process.pid):
                pass
        assert suspend.stands_still(process.pid) == stopped
    finally:
        process.kill()
        process.wait()
