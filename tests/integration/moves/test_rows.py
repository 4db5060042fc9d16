# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What goes wrong in a move, one kind for each of many workloads that move at the same time, and the ending of each.

CRIU, systemd, SSH and the processes are real; the driver is the stand-in. Where a kind is a failure of CRIU itself, a
wrapper around it fails in its place. README.md beside this file says which test proves which row.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from works import CRIU, FAULTS, FIRST, GPUS, HOME, SECOND, Work, Works

from ansible_collections.gpufleet.driver.plugins.module_utils.planning import compatibility

# what is wrong: the driver's knob, of which process, CRIU's fault; the first reason that is told, and the ending
AT_THE_SOURCE: dict[str, tuple[str, int, str, str, str]] = {
    "lock-busy": ("cuda_busy.{0}=1", 0, "", "lock_timeout", "stayed"),
    "lock-error": ("cuda_error.cuCheckpointProcessLock.{0}=304", 0, "", "checkpoint_failed", "stayed"),
    "lock-lie": ("cuda_lie.cuCheckpointProcessLock.{0}=1", 0, "", "checkpoint_failed", "stayed"),
    "lock-second": ("cuda_error.cuCheckpointProcessLock.{0}=304", 1, "", "checkpoint_failed", "stayed"),
    "save-error": ("cuda_error.cuCheckpointProcessCheckpoint.{0}=304", 0, "", "checkpoint_failed", "stayed"),
    "save-unknown": (
        "cuda_error.cuCheckpointProcessCheckpoint.{0}=801", 0, "", "unsupported_feature:checkpoint", "stayed",
    ),
    "save-lie": ("cuda_lie.cuCheckpointProcessCheckpoint.{0}=1", 0, "", "checkpoint_failed", "stayed"),
    "save-second": ("cuda_error.cuCheckpointProcessCheckpoint.{0}=304", 1, "", "checkpoint_failed", "stayed"),
    "save-fatal": ("cuda_fatal.cuCheckpointProcessCheckpoint.{0}=304", 0, "", "checkpoint_failed", "cold_start"),
    "state-lie": ("cuda_lie.cuCheckpointProcessGetState.{0}=1", 0, "", "checkpoint_failed", "stayed"),
    "state-error": ("cuda_error.cuCheckpointProcessGetState.{0}=304", 0, "", "checkpoint_failed", "cold_start"),
    "thread-error": (
        "cuda_error.cuCheckpointProcessGetRestoreThreadId.{0}=304",
        0,
        "",
        "unsupported_feature:device_files",
        "stayed",
    ),
    "undo-error": (
        "cuda_error.cuCheckpointProcessCheckpoint.{0}=304\ncuda_error.cuCheckpointProcessUnlock.{0}=304",
        0,
        "",
        "checkpoint_failed",
        "cold_start",
    ),
    "undo-fatal": ("cuda_fatal.cuCheckpointProcessRestore.{0}=2", 0, "fail", "dump_failed", "cold_start"),
    "dump-killed": ("", 0, "kill", "dump_failed", "cold_start"),
    "dump-error": ("", 0, "fail", "dump_failed", "stayed"),
    "dump-empty": ("", 0, "empty", "dump_failed", "stayed"),
    "dump-short": ("", 0, "short", "dump_failed", "stayed"),
    "dump-running": ("", 0, "running", "dump_failed", "stayed"),
}  # fmt: skip


# waits for its child where no signal reaches it, for as long as that has not become another program
TRACER = "import ctypes, time; print(ctypes.CDLL(None).ptrace(0x4206, PID, 0, 0), flush=True); time.sleep(600)"
SHARER = """import mmap, time
with open("/dev/shm/sharer", "w+b") as file:
    file.truncate(9)
    memory = mmap.mmap(file.fileno(), 9)
time.sleep(600)
"""
ODD = 'it\'s "odd"\n$(touch /tmp/odd); `touch /tmp/odd`'
STUCK = 'python3 -c "import ctypes; libc = ctypes.CDLL(None); libc.vfork() or libc.pause()"'


def test_what_goes_wrong_where_work_is_saved(works: Works) -> None:
    """One of each kind on one machine, with one of two processes that moves among them."""
    rows = {name: Work(name, pair=name.endswith("-second")) for name in AT_THE_SOURCE}
    moves = Work("moves", gpu=1, pair=True, extra={"name": ODD})
    restless = Work("restless", exec_before="for i in 1 2 3 4; do (while :; do sleep 0.002; done) & done;")
    stuck = Work("stuck", exec_before=f"{STUCK} & until grep -q State:.D /proc/$$!/status; do sleep 0.05; done;")
    missing = Work("missing", extra={"save": {"paths": ["/nonexistent"]}})
    others = {
        "monitor": (Work("monitor", exec_before="exec 9</dev/nvidiactl;"), "checkpoint_failed"),
        "loader": (Work("loader", exec_before="sleep 600 9</dev/nvidia0 &"), "unsupported_feature:device_files"),
        "sharer": (Work("sharer", exec_before="python3 /run/sharer.py &"), "unsupported_feature:shared_memory"),
        "traced": (Work("traced"), "unsupported_feature:ptrace"),
        "guarded": (Work("guarded"), "publish_failed"),
    }
    endings = {name: ({reason}, how) for name, (*dummy, reason, how) in AT_THE_SOURCE.items()}
    endings["restless"] = ({"unsupported_feature:unsteady", "dump_failed"}, "stayed")
    endings["stuck"] = ({"unsupported_feature:uninterruptible"}, "stayed")
    endings["missing"] = ({"dump_failed"}, "stayed")
    endings.update((name, ({reason}, "stayed")) for name, (dummy, reason) in others.items())
    everybody = [*rows.values(), moves, restless, stuck, missing, *(work for work, dummy in others.values())]
    works.sh(HOME, f"printf %s {shlex.quote(SHARER)} >/run/sharer.py")
    works.start(*everybody)
    tracer = shlex.quote(TRACER.replace("PID", str(others["traced"][0].pids[0])))
    works.sh(HOME, f"systemd-run -q --unit=tracer python3 -c {tracer}; touch /run/systemd/system/guarded.service.d")
    knobs = [knob.format(rows[name].pids[which]) for name, (knob, which, *dummy) in AT_THE_SOURCE.items() if knob]
    faults = [f"{rows[name].pids[0]} {fault}" for name, (*dummy, fault, reason, how) in AT_THE_SOURCE.items() if fault]
    works.trouble(HOME, knobs, faults)
    told = works.move(*everybody)
    after = works.look()
    assert (told[ODD]["how"], told[ODD]["to"]) == ("moved", FIRST), told[ODD]
    untouched = "ls /tmp/odd /var/lib/gpufleet/checkpoints/traced.json 2>/dev/null"
    assert works.nodes[HOME].sh(untouched, check=False) == ""
    works.sh(HOME, "systemctl stop tracer; rm /run/systemd/system/guarded.service.d")
    for name, (reasons, how) in endings.items():
        assert told[name]["how"] == how and told[name]["reasons"][0]["reason"] in reasons, told[name]
    cold = [name for name, (dummy, how) in endings.items() if how == "cold_start"]
    works.assert_run({**dict.fromkeys(endings, HOME), "moves": FIRST}, after, repeated=cold)
    for node in (HOME, FIRST):
        assert works.left_behind(node) == ""


HANGS_AT_HOME: dict[str, tuple[str, str, str]] = {
    "thread": ("cuda_hang.cuCheckpointProcessGetRestoreThreadId.{}=1", "", "unsupported_feature:device_files"),
    "state": ("cuda_hang.cuCheckpointProcessGetState.{}=1", "", "unsupported_feature:device_files"),
    "lock": ("cuda_hang.cuCheckpointProcessLock.{}=1", "", "lock_timeout"),
    "suspend": ("cuda_hang.cuCheckpointProcessCheckpoint.{}=1", "", "checkpoint_failed"),
    "dump": ("", "hang", "dump_failed"),
}
HANGS_THERE: dict[str, tuple[str, str, str, str]] = {
    "suspend": ("", "hang", "restore_timeout", SECOND),
    "lock": ("cuda_hang.cuCheckpointProcessRestore.{}=1", "", "cuda_restore_failed", SECOND),
    "dump": ("cuda_hang.cuCheckpointProcessUnlock.{}=1", "", "cuda_restore_failed", HOME),
    "state": ("cuda_lie.cuCheckpointProcessGetState.{}=1", "", "verify_failed", HOME),
}


def test_what_hangs_is_ended(works: Works) -> None:
    """Each call of the driver, and CRIU on both sides, with limits that are short: the work runs on; what hangs where
    it comes back goes to the next, or starts again if it may have run there. So does what never ran, and is said to."""
    rows = {name: Work(name, gpu=gpu) for gpu, name in enumerate(HANGS_AT_HOME)}
    works.start(*rows.values())
    store = {"store": str(works.share / "hangs")}

    def carry_out(node: str, act: str, hangs: Mapping[str, tuple[str, ...]]) -> list[dict[str, Any]]:
        pids = {name: rows[name].pids[0] for name in hangs}
        driver = [knob.format(pids[name]) for name, (knob, *dummy) in hangs.items() if knob]
        works.trouble(node, driver, [f"{pids[name]} {criu}" for name, (dummy, criu, *rest) in hangs.items() if criu])
        limits = [{"look": 10, "base": 3 if act == "restore" and criu else 6} for dummy, criu, *rest in hangs.values()]
        orders = [
            works.order(act, name, limits=limit, criu=CRIU, **store) for name, limit in zip(hangs, limits, strict=True)
        ]
        told = works.carry_out(node, orders)
        assert [code for code, dummy in told] == [1] * len(hangs), told
        works.sh(node, f": >{FAULTS}; : >/run/nvidia-standin/state")
        return [said for dummy, said in told]

    told = carry_out(HOME, "capture", HANGS_AT_HOME)
    for said, (*dummy, reason) in zip(told, HANGS_AT_HOME.values(), strict=True):
        assert (said["reason"], said["source"]) == (reason, "running"), said
    works.assert_run(dict.fromkeys(HANGS_AT_HOME, HOME), works.look())
    assert works.left_behind(HOME) == ""

    there = [rows[name] for name in HANGS_THERE]
    works.checkpoint("captured", there, **store)
    works.restore("prepared", there, FIRST, **store)
    works.checkpoint("committed", there, target=FIRST, **store)
    told = carry_out(FIRST, "restore", HANGS_THERE)
    assert [said["reason"] for said in told] == [reason for *dummy, reason, node in HANGS_THERE.values()], told
    moved = works.move(*there, to=[FIRST, SECOND], shared=True, **store)
    after = works.look()
    where = {name: node for name, (*dummy, node) in HANGS_THERE.items()}
    for name, node in where.items():
        assert moved[name]["how"] == ("cold_start" if node == HOME else "moved"), moved[name]
    works.assert_run(where, after, repeated=[name for name, node in where.items() if node == HOME])


AT_THE_TARGET: dict[str, tuple[str, str, str, str]] = {
    "no-memory": ("cuda_fatal.cuCheckpointProcessRestore.{}=2", "", "insufficient_gpu_memory", SECOND),
    "back-error": ("cuda_error.cuCheckpointProcessRestore.{}=304", "", "cuda_restore_failed", SECOND),
    "back-lie": ("cuda_lie.cuCheckpointProcessRestore.{}=1", "", "verify_failed", HOME),
    "unlock-lie": ("cuda_lie.cuCheckpointProcessUnlock.{}=1", "", "cuda_restore_failed", HOME),
    "criu-error": ("", "fail", "restore_failed", SECOND),
    "pid-taken": ("", "occupy", "restore_failed", SECOND),
    "dies-soon": ("", "die", "verify_failed", HOME),
    "stands": ("", "", "verify_failed", HOME),
}


def test_what_goes_wrong_where_work_comes_back(works: Works) -> None:
    """One of each kind, on a GPU each, on the first candidate. What did not run there moves on to the second; what did,
    so that another restore would do its steps twice, starts again at home from its own state."""
    stuck = {"save": {"progress": ["echo", "5"]}}
    rows = {
        name: Work(name, gpu=gpu, extra=stuck if name == "stands" else {}) for gpu, name in enumerate(AT_THE_TARGET)
    }
    works.start(*(work for name, work in rows.items() if name != "pid-taken"))
    works.sh(HOME, "echo 30000 >/proc/sys/kernel/ns_last_pid")  # so that no other's id is taken with it
    works.start(rows["pid-taken"])
    knobs = [knob.format(rows[name].pids[0]) for name, (knob, *dummy) in AT_THE_TARGET.items() if knob]
    faults = [f"{rows[name].pids[0]} {fault}" for name, (dummy, fault, *rest) in AT_THE_TARGET.items() if fault]
    works.trouble(FIRST, knobs, faults)
    told = works.move(*rows.values(), to=[FIRST, SECOND])
    after = works.look()
    for name, (*dummy, reason, node) in AT_THE_TARGET.items():
        assert told[name]["how"] == ("cold_start" if node == HOME else "moved"), told[name]
        assert told[name]["to"] == (None if node == HOME else node), told[name]
        assert told[name]["reasons"][0]["reason"] == reason, told[name]
        kept = told[name]["kept"]
        assert kept in told[name]["next"] and bool(kept) == (node == HOME), told[name]
        assert not kept or works.sh(HOME, f"ls /var/lib/gpufleet/store/{kept}/manifest.json"), told[name]
    where = {name: node for name, (*dummy, node) in AT_THE_TARGET.items()}
    works.assert_run(where, after, repeated=[name for name, node in where.items() if node == HOME])
    assert works.left_behind(FIRST) == ""


def flip(save: Path) -> None:
    pages = save / "images/pages-1.img"
    data = bytearray(pages.read_bytes())
    data[len(data) // 2] ^= 1
    pages.write_bytes(data)


def cut(save: Path) -> None:
    pages = save / "images/pages-1.img"
    pages.write_bytes(pages.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (flip, "hash_mismatch"),
    "cut": (cut, "hash_mismatch"),
    "absent": (lambda save: next((save / "images").glob("core-*.img")).unlink(), "hash_mismatch"),
    "more": (lambda save: (save / "images/more.img").touch(), "hash_mismatch"),
}
KEYS = {
    f"key-{field.name.replace('_', '-')}": field.name
    for field in compatibility.FIELDS
    if field.scope == compatibility.NODE
}
OTHERS: dict[str, Any] = {"gpu_memory": 1 << 50, "cpu_features": ["made_up"], "mig": "on", "mps": "on"}


def test_a_save_that_is_not_what_it_was_is_not_restored(works: Works) -> None:
    """Between the save and the look at it on the target, all is changed that can be; others are as if of a node that
    differs. The work goes on at home. A manifest that was changed by then is not believed: its work is saved anew."""
    keys = {name: {"save": {"key": {field: OTHERS.get(field, "another")}}} for name, field in KEYS.items()}
    names = [*DAMAGE, *KEYS, "manifest"]
    rows = {name: Work(name, gpu=number % GPUS, extra=keys.get(name, {})) for number, name in enumerate(names)}
    works.start(*rows.values())
    store = {"store": str(works.share / "damage")}
    saved = works.checkpoint("captured", rows.values(), **store)
    for name, (damage, dummy) in DAMAGE.items():
        damage(Path(store["store"], saved[name]["artefact"]))
    manifest = Path(store["store"], saved["manifest"]["artefact"], "manifest.json")
    manifest.write_text(manifest.read_text().replace('"rss": ', '"rss": 1'))
    before = works.look()
    told = works.move(*rows.values(), shared=True, **store)
    after = works.look()
    for name, reason in {**{name: reason for name, (dummy, reason) in DAMAGE.items()},
                         **{name: f"key_mismatch:{field}" for name, field in KEYS.items()}}.items():  # fmt: skip
        assert told[name]["how"] == "stayed" and told[name]["reasons"][0]["reason"] == reason, told[name]
        assert before[HOME][name]["steps"], name
    assert (told["manifest"]["how"], told["manifest"]["to"]) == ("moved", FIRST), told["manifest"]
    works.assert_run({**dict.fromkeys([*DAMAGE, *KEYS], HOME), "manifest": FIRST}, after)
    assert not list(Path(store["store"]).glob("*")), "saves of work that runs are of no use"


def test_a_disk_that_fills_while_work_is_saved(works: Works) -> None:
    """The room was there when it was looked for. Before, there was none, none for the record, and nowhere to go."""
    work = Work("work")
    works.start(work)
    assert works.move(work, to=[])["work"]["reasons"][0]["reason"] == "no_target"
    for place, size, step in (("store", "size=1M", "check"), ("checkpoints", "ro", "record")):
        works.sh(HOME, f"mkdir -p /var/lib/gpufleet/{place}; mount -t tmpfs -o {size} none /var/lib/gpufleet/{place}")
        refused = works.checkpoint("captured", [work])["work"]
        assert (refused["reason"]["reason"], refused["reason"]["step"]) == ("insufficient_space", step), refused
        works.sh(HOME, f"umount /var/lib/gpufleet/{place}")
    works.trouble(HOME, criu=[f"{work.pids[0]} fill"])
    works.sh(HOME, "mkdir -p /var/lib/gpufleet/store && mount -t tmpfs -o size=80M none /var/lib/gpufleet/store")
    told = works.move(work)["work"]
    after = works.look()
    assert (told["how"], told["reasons"][0]["reason"]) == ("stayed", "insufficient_space"), told
    assert works.left_behind(HOME) == "filler"
    works.assert_runs(work, HOME, after)
    works.sh(HOME, "umount /var/lib/gpufleet/store; : >/run/criu-faults")
    assert works.move(work)["work"]["to"] == FIRST


def test_a_target_whose_disk_is_full_and_work_that_nobody_brings_back(works: Works) -> None:
    """The second goes on from its save where that was made: nothing has changed there yet."""
    work, homeless = Work("work"), Work("homeless", gpu=1)
    works.start(work, homeless)
    works.sh(FIRST, "mkdir -p /var/lib/gpufleet/store && mount -t tmpfs -o size=4M none /var/lib/gpufleet/store")
    works.trouble(SECOND, criu=[f"{homeless.pids[0]} fail"])
    told = works.move(work, homeless, to=[FIRST, SECOND])
    after = works.look()
    assert (told["work"]["how"], told["work"]["to"]) == ("moved", SECOND), told
    assert told["homeless"]["how"] == "stayed" and not told["homeless"]["kept"], told
    reasons = {name: [reason["reason"] for reason in one["reasons"]] for name, one in told.items()}
    assert reasons == {"work": ["publish_failed"], "homeless": ["publish_failed", "restore_failed"]}, told
    works.assert_run({"work": SECOND, "homeless": HOME}, after)
    for node in (HOME, SECOND):
        assert works.left_behind(node) == ""
    again = works.move(homeless, to=["gpu-3"])["homeless"]
    assert again["reasons"][0]["reason"] == "restore_failed", "it can be saved again"
