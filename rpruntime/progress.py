"""The controller's page: what a run has come to, for `rpctl top` and `rpctl status` to read while it goes on.

    FOLDER/controller.progress     64 KiB, 0600, mapped by the script, read by anybody of the same user

    byte  0  sequence     odd while the page is being written, else even and different for each content
          8  length       of what follows
         16  JSON, UTF-8

Reading costs the run nothing, and writing a few stores: no message is sent to a worker for it. A reader that finds the
sequence odd, or changed meanwhile, reads again.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

PAGE_BYTES = 64 << 10
_BODY_AT = 16
_TRIES = 100


class ProgressPage:
    """The writer's side."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory)[:_BODY_AT].cast("q")
        self._words[0] += self._words[0] % 2  # a predecessor may have died while it wrote

    @classmethod
    def create(cls, path: Path) -> ProgressPage:
        """Make the page's file, or go on with a predecessor's.

        Raises:
            OSError: there is no room.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)  # a full disk is an error here, not a SIGBUS later
            return cls(mmap.mmap(fd, PAGE_BYTES))
        finally:
            os.close(fd)

    def write(self, body: dict[str, Any]) -> bool:
        """Replace the content; False: it is too large, and the old one stays."""
        data = json.dumps(body, separators=(",", ":")).encode()
        if len(data) > PAGE_BYTES - _BODY_AT:
            return False
        self._words[0] += 1
        self._words[1] = len(data)
        self._memory[_BODY_AT : _BODY_AT + len(data)] = data
        self._words[0] += 1
        return True

    def close(self) -> None:
        """Unmap it; the file stays until its session ends."""
        self._words.release()
        self._memory.close()


def progress_path(folder: Path) -> Path:
    """Where a session's page is."""
    return folder / "controller.progress"


def read_progress(folder: Path) -> dict[str, Any] | None:
    """The content of a session's page; None: no controller has written one."""
    try:
        fd = os.open(progress_path(folder), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(_TRIES):
            before = os.pread(fd, PAGE_BYTES, 0)
            after = os.pread(fd, 8, 0)
            sequence = int.from_bytes(before[:8], sys.byteorder)
            if len(before) < _BODY_AT or sequence == 0:
                return None
            if sequence % 2 == 0 and before[:8] == after:
                length = int.from_bytes(before[8:16], sys.byteorder)
                found: dict[str, Any] = json.loads(before[_BODY_AT : _BODY_AT + length])
                return found
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return None
