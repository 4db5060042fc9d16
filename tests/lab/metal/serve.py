# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Answer one HTTP connection on standard input and output with the files of a folder (apt's needs: GET, HEAD, ranges).

QEMU's user network starts it for each connection that a guest makes to http://10.0.2.100/, so the lab's package
repository needs no server of its own, no port, and nothing to stop afterwards. Usage: serve FOLDER
"""

from __future__ import annotations

import os
import sys
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote

CHUNK = 1 << 18


def headers(lines: list[bytes]) -> dict[str, str]:
    pairs = (line.decode("latin-1").partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, dummy, value in pairs}


def answer(request: str, asked: dict[str, str], folder: Path) -> None:
    method, dummy, rest = request.partition(" ")
    path = (folder / unquote(rest.split(" ")[0]).lstrip("/")).resolve()
    if method not in ("GET", "HEAD"):
        return reply("405 Method Not Allowed", {"Content-Length": "0"})
    if not path.is_file() or folder not in path.parents:
        return reply("404 Not Found", {"Content-Length": "0"})
    size, modified = path.stat().st_size, formatdate(path.stat().st_mtime, usegmt=True)
    start = 0
    if asked.get("range", "").startswith("bytes=") and asked.get("if-range", modified) == modified:
        start = int(asked["range"][6:].split("-")[0] or 0)
    if asked.get("if-modified-since") == modified:
        return reply("304 Not Modified", {"Last-Modified": modified})
    if start and start >= size:
        return reply("416 Range Not Satisfiable", {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
    fields = {"Content-Length": str(size - start), "Last-Modified": modified, "Accept-Ranges": "bytes"}
    if start:
        fields["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
    reply("206 Partial Content" if start else "200 OK", fields)
    if method == "GET":
        with path.open("rb") as source:
            source.seek(start)
            while piece := source.read(CHUNK):
                sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def reply(status: str, fields: dict[str, str]) -> None:
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    sys.stdout.buffer.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1"))
    sys.stdout.buffer.flush()


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # QEMU ties standard error to the connection too
    source = sys.stdin.buffer
    while request := source.readline():
        lines = []
        while (line := source.readline()) not in (b"\r\n", b"\n", b""):
            lines.append(line)
        answer(request.decode("latin-1").strip(), headers(lines), folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
