# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Be the parent of a crowd (see crowd.py): crowd_host.py DEVICE PROCESSES FILES HOLDERS DIRECTORY

Prints the PIDs of the holders, then that of the hidden one, when all are ready; ends them all by their ids when its
standard input is closed. It imports next to nothing, so that the processes it forks are about as large as a daemon.
"""

import os
import sys

CLONE_NEWNS = 0x00020000


def hide(device: str, directory: str) -> None:
    """Enter a mount namespace of our own and open the device by a node that exists only there, as a container may."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for argv in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "dev", "none", directory]):
        if os.spawnvp(os.P_WAIT, argv[0], argv) != 0:  # noqa: S606
            raise OSError(f"{argv} failed")
    node = f"{directory}{device}"
    os.makedirs(os.path.dirname(node))  # noqa: PTH103, PTH120
    os.mknod(node, 0o020600, os.stat(device).st_rdev)  # noqa: PTH116
    os.open(node, os.O_RDWR | os.O_NOCTTY)


def some_of_each(directory: str, start: int) -> list:
    """Nine descriptors: six regular files, a pipe, a socket's worth of something else; about what a daemon has."""
    files = [os.open(f"{directory}/{start + n}", os.O_CREAT | os.O_RDWR) for n in range(6)]
    return [*files, *os.pipe(), os.open("/dev/null", os.O_RDWR)]


def main() -> None:
    device, processes, files, holders, directory = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    ready, tell = os.pipe()
    os.mkdir(f"{directory}/private")  # noqa: PTH102
    opened = [ready, tell]
    per_process = files // processes
    while len(opened) + 3 < per_process:
        opened += some_of_each(directory, len(opened))[: per_process - 3 - len(opened)]
    pids = []
    for number in range(processes):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(0)
                os.open("/dev/null", os.O_RDONLY)
                if number < holders:
                    os.open(device, os.O_RDWR | os.O_NOCTTY)
                elif number == holders:
                    hide(device, f"{directory}/private")
                os.write(tell, b".")
                os.read(os.pipe()[0], 1)
            finally:
                os._exit(1)
        pids.append(pid)
    try:
        for dummy in pids:
            os.read(ready, 1)
        print(*pids[: holders + 1], flush=True)
        sys.stdin.read()
    finally:
        for pid in pids:
            os.kill(pid, 9)
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
