"""First lines of every child of a launcher: die with it, log, say hello.

    python -m rpruntime.worker        its `main` calls `start_child()` before it imports anything heavy
    rpruntime/forkserver.py           forks a process that has imported it, and calls the same `main`

The launcher passes, in the environment, RPRUNTIME_FOLDER (the session's folder), RPRUNTIME_ROLE,
RPRUNTIME_INCARNATION and RPRUNTIME_DEATH_FD: the read end of a pipe whose only write end the launcher has, so
that end-of-file means that it is gone. Its pidfd is watched too, and the kernel is asked for SIGKILL at its
end, which also reaches a child that is stopped or stuck in C code.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpruntime.logs import LineFormatter

if TYPE_CHECKING:
    from rpruntime.status import StatusPage
    from rpruntime.store.segments import SegmentClient
    from rpruntime.wire.mailbox import Mailbox

EXIT_START_FAILED = 4
"""Exit code after `Child.start_failed`: the launcher then waits for the reason on its way."""

EXIT_FAILED = 5
"""Exit code after `Child.fail`."""

EXIT_UNFIT = 6
"""Exit code of the fork server where forking would not be safe."""

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def prctl(option: int, value: int | bytes) -> None:
    """Set an attribute of this process, as far as the kernel has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value) if isinstance(value, int) else value, 0, 0, 0)


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot; None if it does not exist or is a zombie.

    With the pid it names a process for good, as pids are used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") else int(fields[19])


def open_pidfd(pid: int, expected_start: int | None = None) -> int:
    """A descriptor that becomes readable at the process's end; -1 where the kernel has none.

    Raises:
        ProcessLookupError: it is gone, or its pid is another process's by now.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        fd = -1
    if expected_start is not None and start_time(pid) != expected_start:
        if fd >= 0:
            os.close(fd)
        raise ProcessLookupError(f"process {pid} is gone")
    return fd


@dataclass(slots=True)
class Child:
    """A child of the launcher, from its own side."""

    role: str
    incarnation: int
    folder: Path
    config: dict[str, Any]
    """The session's flags, `devices` as the list of all names, `threads_per_worker`, `log_dir`."""
    device: str
    """This worker's device ("cuda:1", "cpu:0"), the only one it sees if it is a GPU; "" for the optimizer."""
    log_file: Path
    log_lines: LineFormatter
    """How its log is written; its `task` can be set."""
    _session: dict[str, Any] = field(repr=False)
    _mailbox: Mailbox | None = None
    _segments: SegmentClient | None = None

    @property
    def mailbox(self) -> Mailbox:
        """The process's mailbox, bound at first use; not thread-safe."""
        if self._mailbox is None:
            from rpruntime.wire.mailbox import Mailbox

            public, secret = self._session["keys"]
            self._mailbox = Mailbox(self.folder, self.role, self.incarnation, (public, secret))
        return self._mailbox

    @property
    def segments(self) -> SegmentClient:
        """Shared-memory segments from the launcher; thread-safe."""
        if self._segments is None:
            from rpruntime.store.segments import SegmentClient

            owner = f"{self.role}.{self.incarnation}"
            self._segments = SegmentClient(self.folder, self._session["token"], owner=owner)
        return self._segments

    def status_page(self) -> StatusPage:
        """This process's page for its launcher; without room for it the process ends."""
        from rpruntime.status import StatusPage, status_path

        try:
            return StatusPage.create(status_path(self.folder, self.role, self.incarnation))
        except OSError as err:
            self.start_failed(f"no room for its status page: {err}")
            raise

    def hello(self) -> None:
        """The first message to the launcher."""
        from rpruntime.wire.messages import HelloMsg

        self.mailbox.send("launcher", HelloMsg(self.role, self.incarnation, os.getpid()))

    def ready(self, info: dict[str, Any]) -> None:
        """Tell the launcher that tasks can come. `info`: device name, memory in bytes, threads."""
        from rpruntime.wire.messages import ReadyMsg

        self.mailbox.send("launcher", ReadyMsg(self.role, self.incarnation, info))

    def end(self) -> None:
        """End this process at once, without taking the interpreter and torch apart (half a second)."""
        self.mailbox.close()
        logging.shutdown()
        os._exit(0)

    def fail(self, reason: str) -> None:
        """End this process at once because of `reason`, which is the last line of its log."""
        self.mailbox.close()
        logging.getLogger("rpruntime").error("%s", reason)
        logging.shutdown()
        os._exit(EXIT_FAILED)

    def start_failed(self, reason: str) -> None:
        """Tell the launcher, in words for the user, why this process cannot start, and end."""
        from rpruntime.wire.messages import StartFailedMsg

        logging.getLogger("rpruntime").error("cannot start: %s", reason)
        self.mailbox.send("launcher", StartFailedMsg(self.role, self.incarnation, reason))
        self.mailbox.flush(1.0)
        self.mailbox.close()
        logging.shutdown()
        os._exit(EXIT_START_FAILED)


def start_child() -> Child:
    """Bind this process's life to the launcher's, set up its log, and read who it is. Call it first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    _die_with_parent(parent, int(os.environ["RPRUNTIME_DEATH_FD"]))
    role = os.environ["RPRUNTIME_ROLE"]
    prctl(PR_SET_NAME, f"rp:{role}".encode())  # for ps and top
    incarnation = int(os.environ["RPRUNTIME_INCARNATION"])
    folder = Path(os.environ["RPRUNTIME_FOLDER"])
    lines = _set_up_log(role)
    session = json.loads((folder / "session.json").read_text())
    config = session["config"]
    # The script's modules can be imported here too: pickles name classes by module.
    sys.path[0:0] = [entry for entry in config.get("sys_path", []) if entry not in sys.path]
    index = role.removeprefix("worker-")
    return Child(
        role=role,
        incarnation=incarnation,
        folder=folder,
        config=config,
        device=config["devices"][int(index)] if index.isdigit() else "",
        log_file=Path(config["log_dir"]) / f"{role}.log",
        log_lines=lines,
        _session=session,
    )


def _die_with_parent(parent: int, death_fd: int) -> None:
    os.set_inheritable(death_fd, False)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the pipe is enough for all but stuck processes
    try:
        pidfd = open_pidfd(parent)
    except ProcessLookupError:
        pidfd = -1
    # Not a pidfd of our parent if that died before it was opened: then the pipe is at its end already.
    poller = select.poll()
    poller.register(death_fd, select.POLLIN | select.POLLHUP)
    if pidfd >= 0:
        poller.register(pidfd, select.POLLIN)

    def watch() -> None:
        while not poller.poll():
            pass
        os._exit(1)

    if poller.poll(0):
        os._exit(1)
    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def _set_up_log(role: str) -> LineFormatter:
    """Log to stderr, which the launcher sent to the role's file, and the stack at a crash too."""
    faulthandler.enable()
    level = logging.DEBUG if os.environ.get("RPRUNTIME_DEBUG") == "1" else logging.INFO
    handler = logging.StreamHandler()
    lines = LineFormatter(role)
    handler.setFormatter(lines)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)
    return lines
