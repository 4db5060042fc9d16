# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm's texts as data. slurm-*/ were printed by real daemons; the other texts are from field reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm_text

PRINTED = {name: Path(__file__).parent / f"slurm-{name}" for name in ("22.05", "24.11", "26.05")}
"""By release: three nodes, one drained by us and one by somebody else; jobs of every kind; a reservation."""
WITH_JSON = ["24.11", "26.05"]
every_release = pytest.mark.parametrize("printed", PRINTED.values(), ids=PRINTED)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("IDLE+DRAIN", {"IDLE", "DRAIN"}),
        ("MIXED+DRAIN+REBOOT_REQUESTED", {"MIXED", "DRAIN", "REBOOT_REQUESTED"}),
        ("REBOOT*+DRAIN", {"REBOOT", "NOT_RESPONDING", "DRAIN"}),
        (("IDLE", "INVALID_REG"), {"IDLE", "INVALID_REG"}),
        ("inval", {"INVALID_REG"}),
        ("draining@", {"DRAIN", "REBOOT_REQUESTED"}),
        ("drained$", {"DRAIN", "MAINTENANCE"}),
        (
            "DOWN+CLOUD+REBOOT_ISSUED+NOT_RESPONDING",
            {"DOWN", "CLOUD", "REBOOT_ISSUED", "NOT_RESPONDING"},
        ),
        ("IDLE+BRAND_NEW_FLAG", {"IDLE", "BRAND_NEW_FLAG"}),
    ],
    ids=[
        "drained",
        "A-SLURM-04",
        "A-SLURM-04-star",
        "A-SLURM-02",
        "A-SLURM-02-old",
        "at",
        "dollar",
        "A-SLURM-03",
        "new",
    ],
)
def test_flags(state: str | tuple[str, ...], expected: set[str]) -> None:
    assert slurm_text.flags(state) == expected


def made(state: str, cpus_used: int = 0) -> slurm_text.Node:
    return slurm_text.Node("gpu-1", slurm_text.flags(state), cpus_used=cpus_used)


@pytest.mark.parametrize(
    ("node", "idle"),
    [
        (made("IDLE+DRAIN"), True),
        (made("IDLE+DRAIN+MAINTENANCE+RESERVED"), True),
        (made("ALLOCATED+DRAIN"), False),
        (made("MIXED+DRAIN"), False),
        (made("IDLE+COMPLETING+DRAIN"), False),
        (made("IDLE"), False),
        (made("IDLE+DRAIN", cpus_used=1), False),
        (made("IDLE+DRAIN+NOT_RESPONDING"), False),
        (made("DOWN+DRAIN+REBOOT_ISSUED"), False),
        (made("UNKNOWN+DRAIN"), False),
    ],
    ids=lambda value: "+".join(sorted(value.state)) if isinstance(value, slurm_text.Node) else str(value),
)
def test_a_node_is_idle_only_if_nothing_speaks_against_it_A_SLURM_06(node: slurm_text.Node, idle: bool) -> None:
    assert (node.busy() == "") == idle


@every_release
def test_nodes(printed: Path) -> None:
    nodes = slurm_text.nodes((printed / "nodes.txt").read_text())
    assert list(nodes) == ["gpu-1", "gpu-2", "gpu-3"]
    first, second, third = nodes.values()
    assert first.gres == {"gpu": 4} and first.used == {"gpu": 4} and first.model == "h100"
    assert first.active == ("lab", "driver-535.183.01") and first.partitions == ("gpu",)
    assert (first.cpus, first.cpus_used, first.memory) == (8, 4, 4000 << 20)
    assert not first.drain and first.reason == ""
    assert second.drain and second.reason == "gpufleet: NVIDIA driver upgrade, run=r-1"
    assert second.reason_by == "root" and second.reason_at > 1795980000.0
    assert third.reason == 'bad DIMM | see "#4711", 100 %'


@pytest.mark.parametrize("release", WITH_JSON)
def test_the_text_says_what_the_json_of_the_same_moment_says(release: str) -> None:
    printed = PRINTED[release]
    nodes = slurm_text.nodes((printed / "nodes.txt").read_text())
    for said in json.loads((printed / "nodes.json").read_text())["nodes"]:
        node = nodes[said["name"]]
        assert node.state == slurm_text.flags(tuple(said["state"]))
        assert [node.available, node.active] == [tuple(said["features"]), tuple(said["active_features"])]
        assert node.gres == slurm_text.gres_of(said["gres"])[0]
        assert node.used == slurm_text.gres_of(said["gres_used"])[0]
        assert (node.reason, node.reason_by) == (said["reason"], said["reason_set_by_user"])
        assert (node.reason_at or 0) == said["reason_changed_at"]["number"]
        assert (node.cpus, node.cpus_used) == (said["effective_cpus"], said["alloc_cpus"])
        assert node.memory == said["real_memory"] << 20 and node.partitions == tuple(said["partitions"])


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
@pytest.mark.parametrize("field", ["Reason", "Comment", "Extra"])
def test_free_text_cannot_pass_for_other_fields(release: str, field: str) -> None:
    """Slurm prints what people write as it is; what it knows itself comes before."""
    line = (PRINTED[release] / "nodes.txt").read_text().split("\n")[2]
    evil = "x NodeName=y State=IDLE Gres=gpu:9 Reason=gpufleet: run=r [me@1] ]"
    line = line.replace("bad DIMM", evil) if field == "Reason" else f"{line.split(' Comment=')[0]} {field}={evil}"
    node = slurm_text.nodes(line)["gpu-3"]
    assert node.drain and node.gres == {"gpu": 4}
    assert node.reason.startswith("x NodeName=y State=IDLE" if field == "Reason" else "bad DIMM | see")


@every_release
def test_reservations(printed: Path) -> None:
    found = slurm_text.reservations((printed / "reservations.txt").read_text())["gpufleet-gpu-2"]
    assert found.nodes == ("gpu-2", "gpu-3") and found.active and {"MAINT", "IGNORE_JOBS"} <= found.flags
    assert slurm_text.reservations("No reservations in the system\n") == {}


@every_release
def test_jobs(printed: Path) -> None:
    jobs = slurm_text.jobs((printed / "jobs.txt").read_text(), "n0nce")
    by_id = {job.shown: job for job in jobs}
    assert list(by_id) == ["3_[2-5%1]", "1", "2", "3_1", "4"]
    array, named, fixed, task, talk = jobs
    assert array.state == "PENDING" and array.tasks == 4 and array.required == ("gpu-1",) and array.constraint == "lab"
    assert named.name == "we|ird na\nme Requeue=0 \x1f x" and named.comment == "hi there\n  NodeList=x"
    assert named.nodes == ("gpu-1",) and named.batch and named.requeue and named.limit == 1800
    assert named.ends == named.started + 1800 and named.resources == {"gpu": 1, "cpu": 1000}
    assert not fixed.requeue and fixed.resources["gpu"] == 1
    assert task.id == "3_1" and array.id == "3" and task.on_node
    assert not talk.batch and talk.resources["gpu"] == 1


def test_another_nonce_reads_nothing() -> None:
    with pytest.raises(ValueError, match="squeue printed"):
        slurm_text.jobs((PRINTED["22.05"] / "jobs.txt").read_text(), "other")


@pytest.mark.parametrize(
    ("text", "expected", "model"),
    [
        ("gpu:h100:4(S:0-1)", {"gpu": 4}, "h100"),
        ("gpu:h100:8(IDX:0-3,5,7-8)", {"gpu": 8}, "h100"),
        ("gpu:4", {"gpu": 4}, None),
        ("gpu", {"gpu": 1}, None),
        ("gres:gpu:2", {"gpu": 2}, None),
        ("gres/gpu:a100:2", {"gpu": 2}, "a100"),
        ("gpu:a100:2,gpu:1g.10gb:7,shard:32", {"gpu": 2, "mig-1g.10gb": 7}, "a100"),
        ("gpu:nvidia_a100_1g.5gb:3", {"mig-1g.5gb": 3}, None),
        ("gpu:h100:0(IDX:N/A)", {"gpu": 0}, "h100"),
        ("", {}, None),
        ("shard:8", {}, None),
    ],
)
def test_gres(text: str, expected: dict[str, int], model: str | None) -> None:
    assert slurm_text.gres_of(text) == (expected, model)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("gres/gpu count reported lower than configured (0 < 8)", (0, 8)),
        ("gres/gpu count reported lower than configured (0 < 1)", (0, 1)),
        ("gres/gpu count too low (7 < 8)", (7, 8)),
        ("bad DIMM", None),
    ],
    ids=["A-SLURM-01", "A-SLURM-01-one", "older", "other"],
)
def test_gpus_missing(reason: str, expected: tuple[int, int] | None) -> None:
    assert slurm_text.gpus_missing(reason) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu-[1-2]", ["gpu-1", "gpu-2"]),
        ("gpu-[01-02,7],login", ["gpu-01", "gpu-02", "gpu-7", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("gpu-1,gpu-2", ["gpu-1", "gpu-2"]),
        ("a[1]b", ["a1b"]),
        ("", []),
    ],
)
def test_expand(text: str, expected: list[str]) -> None:
    assert slurm_text.expand(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-02:03:04", 93784),
        ("30:00", 1800),
        ("59", 59),
        ("2-0", 172800),
        ("UNLIMITED", None),
        ("", None),
        ("INVALID", None),
    ],
)
def test_seconds(text: str, expected: float | None) -> None:
    assert slurm_text.seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12", 1), ("12_3", 1), ("12_[3-5,9%2]", 4), ("12_[0-100:10]", 11), ("12_[1-3,...]", 3)],
)
def test_pending_tasks(text: str, expected: int) -> None:
    assert slurm_text.pending_tasks(text) == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("socket=/run/munge/munge.socket.2,cred_expire=300", 300),
        ("cred_expire=3", 120),
        ("(null)", 120),
    ],
)
def test_credential_seconds(info: str, expected: int) -> None:
    text = f"AuthAltTypes            = cred_expire=9\nAuthInfo                = {info}\nAuthType = auth/munge\n"
    assert slurm_text.credential_seconds(text) == expected
