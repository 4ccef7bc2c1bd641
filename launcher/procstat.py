"""What `/proc/PID/stat` tells of a child."""

from __future__ import annotations

import os
from pathlib import Path

_STATE, _PARENT, _FLAGS, _EXIT_CODE = 0, 1, 6, 49  # counted after the name
_PF_EXITING = 0x4


def _stat(pid: int) -> tuple[str, list[str]]:
    """The name, and what comes after it; nothing if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", []
    before, _, after = stat.rpartition(")")  # the name may hold anything
    return before.partition("(")[2], after.split()


def _fields(pid: int) -> list[str]:
    return _stat(pid)[1]


def children_named(name: str) -> list[int]:
    """Children of this process of that name, those too that have ended and are not collected.

    It reads all of /proc: the kernel's own list of children may leave some out while others end.
    """
    me, found = str(os.getpid()), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            its_name, fields = _stat(int(entry))
            if its_name == name and fields[_PARENT] == me:
                found.append(int(entry))
    return found


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
