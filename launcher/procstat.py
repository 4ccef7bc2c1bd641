"""What `/proc/PID/stat` tells of a child."""

from __future__ import annotations

import os
from pathlib import Path

_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49  # counted after the name
_PF_EXITING = 0x4


def _fields(pid: int) -> list[str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the name before it may hold anything


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return _fields(pid)[:1] == ["T"]


def exiting_code(pid: int) -> int | None:
    """The exit code, negative for a signal, of a process that runs no line of its program any more but still exits.

    None: it is not exiting, or gone. The kernel takes its memory apart before it reports the end: 40 ms for each GiB of
    shared memory that was mapped, and more where the memory is pinned.
    """
    fields = _fields(pid)
    if not fields or not int(fields[_FLAGS]) & _PF_EXITING:
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
