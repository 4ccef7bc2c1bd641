"""The leak check at the end of every test with real processes: processes, sockets, memory, descriptors.

with no_leaks() as watch:
    run = subprocess.run(command, env={**os.environ, **watch.environ})
# here: nothing that carries the mark in its environment is left
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MARK = "RPRUNTIME_TEST_MARK"


def wait_until(condition: Callable[[], object], within_s: float = 10.0, what: str = "") -> None:
    """Poll until the condition holds; fail at the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what or condition}"
        time.sleep(0.01)


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Pids (with command lines) whose environment at their start had `variable=value`."""
    wanted = f"{variable}={value}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def segment_holders(launcher_pid: int) -> dict[int, str]:
    """Processes that still map or hold a segment of this launcher (nameless, but /proc shows what it was)."""
    part = f"/rpruntime-{os.getuid()}-{launcher_pid}-"
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if part in (entry / "maps").read_text():
                found[int(entry.name)] = "mapping"
            for fd in (entry / "fd").iterdir():
                if part in os.readlink(fd):
                    found[int(entry.name)] = f"descriptor {fd.name}"
    return found


def shm_names() -> set[str]:
    """Names of ours in /dev/shm; there never is one for longer than an instant."""
    return {path.name for path in Path("/dev/shm").glob("rpruntime-*")}


def open_descriptors() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


@dataclass
class Watch:
    """What is watched. `environ` marks a run's processes; folders and launchers are added once known."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    folders: set[Path] = field(default_factory=set)
    launchers: set[int] = field(default_factory=set)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Processes of the test's own, to be collected at the end."""

    @property
    def environ(self) -> dict[str, str]:
        """Add this to the environment of the processes that are to leave nothing."""
        return {MARK: self.mark}

    def left(self) -> list[str]:
        """What is still there, in words."""
        found = [f"process {pid}: {line}" for pid, line in processes_with(MARK, self.mark).items()]
        for folder in self.folders:
            found += [f"process {pid}: {line}" for pid, line in processes_with("RPRUNTIME_FOLDER", str(folder)).items()]
        for pid in self.launchers:
            found += [f"process {holder} has shared memory: {how}" for holder, how in segment_holders(pid).items()]
        return found


def assert_no_leaks(watch: Watch, *, within_s: float = 5.0, allow: tuple[str, ...] = (), sockets: bool = True) -> None:
    """Nothing of ours is left within `within_s`.

    Args:
        watch: what to look for.
        within_s: time for it to go.
        allow: command lines that contain one of these are the user's own.
        sockets: also no socket in the folders (a launcher that was killed leaves its, to be cleaned later).
    """

    def left() -> list[str]:
        found = [row for row in watch.left() if not any(text in row for text in allow)]
        if sockets:
            found += [f"socket {path}" for folder in watch.folders for path in folder.glob("*.sock")]
        return found

    deadline = time.monotonic() + within_s
    while left():
        assert time.monotonic() < deadline, f"left after {within_s} s: {left()}"
        time.sleep(0.02)
    assert not shm_names() - _names_before, shm_names()


_names_before = shm_names()


@contextlib.contextmanager
def no_leaks(
    *, within_s: float = 5.0, allow: tuple[str, ...] = (), sockets: bool = True, descriptors: bool = True
) -> Iterator[Watch]:
    """Runs the leak check at the end of the block, also of this process's own descriptors."""
    before = open_descriptors()
    watch = Watch()
    try:
        yield watch
        for popen in watch.started:
            popen.wait(within_s)
    finally:
        # After a failure: the next test is to find a clean machine.
        while sys.exc_info()[0] is not None and (left := processes_with(MARK, watch.mark)):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for popen in watch.started:
            popen.wait(5)
    assert_no_leaks(watch, within_s=within_s, allow=allow, sockets=sockets)
    if descriptors:
        wait_until(
            lambda: open_descriptors() <= before,
            2.0,
            f"{before} descriptors before, {open_descriptors()} after",
        )
