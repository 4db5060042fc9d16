# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep what Python compiles from zip files; loaded at Python's start in every machine of this lab.

Ansible sends each module as a zip file of sources, ten thousand lines that the machine compiles anew each time: some
tenths of a second on a processor, but most of the time of a module on an emulated one. What is compiled, and what it
does, is the same. The file may be removed from a machine at any time.
"""

from __future__ import annotations

import _imp
import marshal
import os
import zipimport

FOLDER = "/var/cache/gpufleet-lab"
_compile = zipimport._compile_source


def _compile_once(pathname, source):
    if os.geteuid():  # what root runs is only taken from what root has written
        return _compile(pathname, source)
    path = f"{FOLDER}/{_imp.source_hash(3571, source).hex()}-{len(source)}"
    try:
        with open(path, "rb") as stream:
            return marshal.load(stream)  # noqa: S302
    except (OSError, EOFError, ValueError, TypeError):
        pass
    code = _compile(pathname, source)
    try:
        os.makedirs(FOLDER, 0o700, exist_ok=True)  # noqa: PTH103
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "wb") as stream:
            marshal.dump(code, stream)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError:
        pass  # a full disk only makes it slower
    return code


zipimport._compile_source = _compile_once
