# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from dataclasses import replace

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm_jobs
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_jobs import Policy, Token
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_text import Job, Node, flags

JOB = Job("7", "3_1", "RUNNING", "alice", ("gpu-1",), batch=True, requeue=True, resources={"gpu": 2})
SAVER = replace(JOB, comment="nightly gpufleet.signal=SIGUSR1 gpufleet.saved=/scratch/a.pt")
FIXED = replace(JOB, requeue=False)
TALK = replace(JOB, batch=False)
NOW, LATER, DEADLINE = 1000.0, 5000.0, 2000.0
ASKED = Token("r1", "asked", 990, "none")


@pytest.mark.parametrize(
    ("job", "policy", "may"),
    [
        (JOB, Policy(), {"wait", "restart"}),
        (SAVER, Policy(), {"wait", "restart", "move"}),
        (replace(SAVER, requeue=False), Policy(), {"wait"}),
        (FIXED, Policy(no_requeue="cancel"), {"wait", "restart"}),
        (FIXED, Policy(no_requeue="requeue"), {"wait", "restart"}),
        (TALK, Policy(), {"wait"}),
        (TALK, Policy(interactive="cancel"), {"wait", "restart"}),
        (replace(JOB, comment="gpufleet.may=wait"), Policy(), {"wait"}),
        (replace(JOB, comment="gpufleet.may=protect"), Policy(), {"protect"}),
        (replace(JOB, comment="gpufleet.may=anything"), Policy(), {"wait"}),
        (replace(JOB, comment="gpufleet.may=move"), Policy(), {"wait"}),
        (replace(JOB, comment="gpufleet.signal=USR1"), Policy(), {"wait", "restart"}),
        (replace(JOB, comment="gpufleet.signal=-9;x gpufleet.saved=/a"), Policy(), {"wait", "restart"}),
        (replace(JOB, comment="gpufleet.signal=USR1 gpufleet.saved=a.pt"), Policy(), {"wait", "restart"}),
    ],
)
def test_what_may_be_done_to_a_job(job: Job, policy: Policy, may: set[str]) -> None:
    assert slurm_jobs.allowed(job, policy) == may


def noted(job: Job, token: Token) -> Job:
    return replace(job, admin_comment=slurm_jobs.with_token(job.admin_comment, "text", token))


@pytest.mark.parametrize(
    ("job", "fate", "now", "policy", "saved", "do"),
    [
        (SAVER, "move", NOW, Policy(), False, "signal"),
        (noted(SAVER, Token("r0", "asked", 1, "none")), "move", NOW, Policy(), True, "signal"),
        (noted(SAVER, ASKED), "move", NOW, Policy(), False, "wait"),
        (noted(SAVER, ASKED), "move", NOW, Policy(), True, "hold"),
        (noted(SAVER, ASKED), "move", 1500.0, Policy(), False, "wait"),
        (noted(SAVER, ASKED), "move", LATER, Policy(), False, "requeue"),
        (SAVER, "cold_start", NOW, Policy(), False, "signal"),
        (SAVER, "wait", LATER, Policy(), False, "signal"),
        (noted(SAVER, ASKED), "cold_start", NOW, Policy(), False, "wait"),
        (noted(SAVER, ASKED), "cold_start", NOW, Policy(), True, "requeue"),
        (noted(SAVER, ASKED), "cold_start", 1500.0, Policy(), False, "requeue"),
        (JOB, "move", NOW, Policy(), False, "requeue"),
        (JOB, "cold_start", NOW, Policy(), False, "requeue"),
        (JOB, "wait", NOW, Policy(), False, "wait"),
        (JOB, "", NOW, Policy(), False, "wait"),
        (JOB, "wait", LATER, Policy(), False, "requeue"),
        (replace(JOB, comment="gpufleet.may=wait"), "cold_start", NOW, Policy(), False, "wait"),
        (replace(JOB, comment="gpufleet.may=wait"), "wait", LATER, Policy(), False, "fail"),
        (FIXED, "cold_start", NOW, Policy(), False, "wait"),
        (FIXED, "wait", LATER, Policy(), False, "fail"),
        (FIXED, "wait", LATER, Policy(no_requeue="cancel"), False, "cancel"),
        (FIXED, "wait", LATER, Policy(no_requeue="requeue"), False, "requeue"),
        (TALK, "wait", LATER, Policy(), False, "fail"),
        (TALK, "cold_start", NOW, Policy(interactive="cancel"), False, "cancel"),
        (replace(SAVER, state="SUSPENDED"), "move", NOW, Policy(), False, "requeue"),
        (replace(FIXED, state="SUSPENDED"), "wait", NOW, Policy(), False, "wait"),
    ],
)
def test_what_is_done_next(job: Job, fate: str, now: float, policy: Policy, saved: bool, do: str) -> None:
    token = slurm_jobs.token(job.admin_comment)
    ours = token if token and token.run == "r1" else None
    assert slurm_jobs.next_step(job, fate, now, DEADLINE, policy, ours, saved).do == do


@pytest.mark.parametrize(
    ("ends", "noted", "now", "do"),
    [
        (1900.0, None, 1999.0, "wait"),
        (1900.0, None, 2100.0, "wait"),
        (1900.0, None, 2200.0, "fail"),
        (9000.0, Token("r1", "done", 2100), 2300.0, "wait"),
        (9000.0, Token("r1", "done", 2100), 2400.0, "fail"),
        (9000.0, None, 2300.0, "fail"),
    ],
    ids=["in time", "late", "hangs", "requeued late", "requeued and hangs", "requeued by others and hangs"],
)
def test_a_job_that_never_comes_to_its_end_fails_its_node(
    ends: float, noted: Token | None, now: float, do: str
) -> None:
    """Slurm 22.05 and later say of a requeued job that it will end when its next run would."""
    job = replace(JOB, state="COMPLETING", ends=ends)
    step = slurm_jobs.next_step(job, "", now, DEADLINE, Policy(), noted, False)
    assert step.do == do and ("state=down" in step.why) == (do == "fail")


def saver(shown: str, file: str, **more: object) -> Job:
    return replace(JOB, id=shown, shown=shown, comment=f"gpufleet.signal=USR1 gpufleet.saved={file}", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("jobs", "shared"),
    [
        ([saver("3_1", "/a"), saver("3_2", "/a")], {"/a"}),
        ([saver("3_1", "/a"), saver("4", "/a")], {"/a"}),
        ([saver("3_1", "/%A/%a"), saver("3_2", "/%A/%a"), saver("4_1", "/%A/%a")], set()),
        ([saver("3_1", "/a"), saver("3_2", "/a", state="PENDING", nodes=())], set()),
        ([saver("9+0", "/a"), saver("9+1", "/a")], set()),
        ([JOB, replace(JOB, shown="3_2")], set()),
    ],
    ids=["tasks", "jobs", "each its own", "one waits", "heterogeneous", "none"],
)
def test_a_save_file_of_several_jobs_is_no_proof(jobs: list[Job], shared: set[str]) -> None:
    assert slurm_jobs.shared_saves(jobs) == shared


def test_jobs_with_one_save_file_are_only_waited_for_and_are_named_with_the_way_out() -> None:
    tasks = [saver("3_1", "/a"), saver("3_2", "/a")]
    work = {one.name: one for one in seen([node("gpu-1")], tasks).workloads}
    assert [(one.may, one.backends) for one in work.values()] == [({"wait"}, ())] * 2
    for fate, now, do in (("move", NOW, "wait"), ("", LATER, "fail")):
        step = slurm_jobs.next_step(tasks[0], fate, now, DEADLINE, Policy(), None, True, {"/a"})
        assert step.do == do
    assert "scontrol update jobid=3_1 comment=" in step.why and "%a" in step.why


def test_tasks_of_an_array_name_their_own_save_files() -> None:
    assert slurm_jobs.declared(saver("12_3", "/scratch/%A/step-%a.pt")).saved == "/scratch/12/step-3.pt"
    assert slurm_jobs.declared(saver("12", "/scratch/%a.pt")).saved == "/scratch/%a.pt"


def test_a_path_that_no_file_can_have_counts_as_not_said() -> None:
    assert slurm_jobs.declared(saver("12", "/" + "a" * 9000)) == slurm_jobs.Declared()


@pytest.mark.parametrize(
    "before", ["", "ticket 12", "a | gpufleet: old [run=r0 step=done at=1 seen= feature= was= off=]"]
)
@pytest.mark.parametrize(
    "message", ["gpu-1 gets another driver", "saves itself to /a/run[7].pt", "to /[run=r9 step=done at=1 ] |"]
)
def test_a_note_goes_round_and_keeps_what_others_wrote(before: str, message: str) -> None:
    token = Token("r1", "held", 12, "1.2.3", "driver-535.183.01", "a&b", "gpu-1,gpu-2")
    text = slurm_jobs.with_token(before, message, token)
    assert slurm_jobs.token(text) == token
    assert slurm_jobs.without_token(text) == slurm_jobs.without_token(before)
    assert slurm_jobs.token(slurm_jobs.without_token(text)) is None


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ("", "driver-1"),
        ("h100", "h100&driver-1"),
        ("a&b", "a&b&driver-1"),
        ("a|b", None),
        ("[a|b]", None),
        ("a*2", None),
        ("driver-2", None),
    ],
)
def test_a_constraint_is_only_added_to_where_its_meaning_stays(constraint: str, expected: str | None) -> None:
    assert slurm_jobs.bound(constraint, "driver-1") == expected


def test_other_features_stay_in_their_order_and_as_they_are() -> None:
    node = Node(
        "n", flags("IDLE"), available=("b", "driver-1", "driver-lts", "a"), active=("driver-1", "driver-lts", "a")
    )
    available, active = slurm_jobs.features_with(node, "2")
    assert available == ("b", "driver-lts", "a", "driver-2") and active == ("driver-lts", "a", "driver-2")
    assert slurm_jobs.version_of(node) == "1"


def node(name: str, state: str = "MIXED", **more: object) -> Node:
    values = {"gres": {"gpu": 4}, "used": {}, "model": "h100", "partitions": ("gpu",), "cpus": 8, **more}
    return Node(name, flags(state), **values)  # type: ignore[arg-type]


def seen(nodes: list[Node], jobs: list[Job], **ours: str) -> fleet.Snapshot:
    made = slurm_jobs.snapshot({n.name: n for n in nodes}, jobs, {}, (), ours, NOW, Policy())
    fleet.check(made)
    return made


def test_a_heterogeneous_job_is_one_workload() -> None:
    parts = [replace(JOB, id=str(9 + n), shown=f"9+{n}", het="9", nodes=(f"gpu-{n + 1}",)) for n in (0, 1)]
    made = seen([node("gpu-1"), node("gpu-2")], parts)
    assert [(work.name, len(work.members)) for work in made.workloads] == [("job 9", 2)]


def test_nodes_without_gpus_are_left_out_and_ours_are_not_foreign() -> None:
    nodes = [
        node("cpu-1", gres={}),
        node("gpu-1", "IDLE+DRAIN", reason="gpufleet: NVIDIA driver upgrade, run=r1"),
        node("gpu-2", "DOWN+NOT_RESPONDING", reason="Not responding"),
    ]
    made = {n.name: n for n in seen(nodes, [], **{"gpu-1": "r1"}).nodes}
    assert set(made) == {"gpu-1", "gpu-2"}
    assert made["gpu-1"].cordoned_by is None and not made["gpu-1"].schedulable
    assert made["gpu-2"].cordoned_by == "Slurm: DOWN+NOT_RESPONDING (Not responding)"


def test_queued_work_is_counted_by_model_with_arrays_and_without_held_jobs() -> None:
    waiting = replace(JOB, state="PENDING", nodes=(), partition="gpu", reason="Resources", limit=600.0)
    jobs = [
        replace(waiting, tasks=5),
        replace(waiting, width=2, limit=1800.0),
        replace(waiting, held=True),
        replace(waiting, reason="Dependency"),
        replace(waiting, resources={"gpu": 2}, model="a100", limit=None),
    ]
    queue = seen([node("gpu-1")], jobs).queue
    assert (queue["h100"].gpus, queue["h100"].shortest) == (14, 600.0)
    assert queue["h100"].duration == pytest.approx((10 * 600 + 4 * 1800) / 14)
    assert (queue["a100"].gpus, queue["a100"].duration) == (2, 0.0)


HELD = replace(SAVER, state="PENDING", nodes=(), held=True, reason="job requeued in held state")


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (HELD, True),
        (noted(HELD, Token("r1", "held", 1)), False),
        (replace(HELD, held=False, reason="BeginTime"), False),
        (replace(HELD, reason="JobHeldUser"), False),
        (replace(HELD, comment=""), False),
    ],
)
def test_a_job_that_we_may_have_held_is_named_with_the_way_out(job: Job, named: bool) -> None:
    said = slurm_jobs.held_by_nobody([job])
    assert [f"scontrol release {job.shown}" in line for line in said] == [True] * named


def test_a_job_that_still_runs_bound_to_a_driver_is_named_with_the_way_out() -> None:
    moved = replace(noted(SAVER, Token("r1", "done", 1, feature="driver-1", was="a&b")), constraint="a&b&driver-1")
    changed = replace(moved, constraint="a100")
    jobs = [moved, changed, noted(SAVER, Token("r1", "done", 1)), replace(moved, state="PENDING", nodes=())]
    assert [line.rpartition(": ")[2] for line in slurm_jobs.still_bound(jobs)] == [
        "scontrol update jobid=3_1 'features=a&b'"
    ]


def test_what_we_bound_a_moved_job_to_is_no_wish_of_its_owner() -> None:
    note = Token("r1", "done", 1, feature="driver-535.1", was="lab")
    moved = replace(noted(SAVER, note), constraint="lab&driver-535.1")
    assert slurm_jobs.own_constraint(moved) == "lab"
    assert slurm_jobs.own_constraint(replace(moved, admin_comment="")) == "lab&driver-535.1"
    assert slurm_jobs.own_constraint(replace(moved, constraint="lab&driver-lts")) == "lab&driver-lts"


def test_a_drain_to_whose_reason_somebody_added_words_is_not_ours() -> None:
    ours = Node("n", flags("IDLE+DRAIN"), reason="gpufleet: NVIDIA driver upgrade, run=r1")
    assert slurm_jobs.our_run(ours) == "r1"
    assert slurm_jobs.our_run(ours._replace(reason=f"{ours.reason} -- carol: keep it out")) is None
