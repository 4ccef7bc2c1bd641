"""Why a process ended, in words: the signal by name, the out-of-memory killer, the end of its log."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from rpruntime.status import Status
from rpruntime.store.limits import cgroup_folders, gib, read_cgroup, read_host_memory

NUM_LOG_LINES = 12
_MAX_LINE = 300
_CHATTER = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \S+ (DEBUG|INFO|WARNING) ")
_LOG_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \S+ [A-Z]+ (\[slot \d+[^\]]*\] )?")


@dataclass(frozen=True, slots=True)
class OomCounter:
    """Processes that the kernel killed for memory, in our cgroups or on the whole machine."""

    cgroup: int
    machine: int

    @classmethod
    def read(cls, root: Path = Path("/")) -> OomCounter:
        """The counters now."""
        in_cgroup = 0
        for folder, is_v2 in cgroup_folders(root):
            table = _table(folder / ("memory.events" if is_v2 else "memory.oom_control"))
            in_cgroup = max(in_cgroup, table.get("oom_kill", 0))
        return cls(in_cgroup, _table(root / "proc/vmstat").get("oom_kill", 0))


def describe_end(returncode: int, before: OomCounter, root: Path = Path("/")) -> str:
    """Words for the end of a process: "killed by signal 11 (SIGSEGV)", "exit code 3"...

    Args:
        returncode: as `subprocess` has it, negative for a signal.
        before: the counters before it ended; if they rose meanwhile, a SIGKILL was the kernel's.
        root: root of the file system, for tests.
    """
    if returncode >= 0:
        return f"exit code {returncode}"
    number = -returncode
    text = f"killed by signal {number} ({signal_name(number)})"
    if number == signal.SIGKILL:
        now = OomCounter.read(root)
        limit, _ = read_cgroup(root)
        if now.cgroup > before.cgroup and limit is not None:
            return f"out of host memory: {text} by the kernel, the cgroup's limit is {gib(limit)}"
        if now.cgroup > before.cgroup or now.machine > before.machine:
            total = read_host_memory(root).ram_total
            return f"out of host memory: {text} by the kernel, the machine has {gib(total)}"
        return f"{text}, not by the kernel for memory"
    if number == signal.SIGBUS:
        memory = read_host_memory(root)
        shm = f"{gib(memory.shm_free)} free of {gib(memory.shm_total)}"
        return f"{text}: memory behind a mapping is gone or cannot be had; /dev/shm has {shm}"
    return text


def describe_place(status: Status | None) -> str:
    """What a worker was doing: "backward of layer 3, micro-batch 2 (slot 12)"; "" if nothing, or nobody knows.

    Layers count from 0 and micro-batches from 1, as in the report of an exception.
    """
    if status is None:
        return ""
    place = status.phase
    if status.layer >= 0:
        place += f" of layer {status.layer}" if place else f"layer {status.layer}"
    if status.microbatch >= 0:
        place += (", " if place else "") + f"micro-batch {status.microbatch + 1}"
    slots = ", ".join(map(str, status.slots))
    if not slots:
        return place
    slots = f"slot{'s' * (len(status.slots) > 1)} {slots}"
    return f"{place} ({slots})" if place else slots


def signal_name(number: int) -> str:
    """SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown signal"


def last_lines(log_file: Path, count: int = NUM_LOG_LINES, *, start: int = 0) -> list[str]:
    """The end of a log, without empty lines and without the first `start` bytes, which are another process's."""
    try:
        with log_file.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip()[:_MAX_LINE] for line in text.splitlines() if line.strip()]
    return lines[-count:]


def without_log_prefix(line: str) -> str:
    """A line of a child's log without time, role, level and slot."""
    return _LOG_PREFIX.sub("", line)


def says_why(line: str) -> bool:
    """Whether the last line of a log can be the cause of an end: a traceback's, an error's, anything but chatter."""
    return not _CHATTER.match(line)


def note_end(log_file: Path, line: str) -> None:
    """Write into a process's log how it ended; so no message names a log that is empty, and goes with its session."""
    with contextlib.suppress(OSError), log_file.open("a") as file:
        file.write(f"{line}\n")


def _table(path: Path) -> dict[str, int]:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
