"""The fork server (`rpruntime/forkserver.py`) from the launcher's side. Nothing here waits.

    starts --> is_ready: takes requests --> ended

It is of use for as long as it runs; what is to follow from its end is its owner's to decide.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from launcher.procstat import children_named
from rpruntime.forkserver import PROCESS_NAME, SOCKET_VARIABLE
from rpruntime.process import PR_SET_CHILD_SUBREAPER, prctl


@dataclass(frozen=True, slots=True)
class Forked:
    """A role's process runs, as our child."""

    role: str
    pid: int


@dataclass(frozen=True, slots=True)
class NotForked:
    """There is no process for this role, and why."""

    role: str
    reason: str


class ForkServer:
    """A running fork server.

    Args:
        start: starts its process, given what its environment has to have and a descriptor that it has to inherit.
    """

    def __init__(self, start: Callable[[Mapping[str, str], int], subprocess.Popen[bytes]]) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with theirs:
            try:
                self.process = start({SOCKET_VARIABLE: str(theirs.fileno())}, theirs.fileno())
            except BaseException:
                self._sock.close()
                raise
        self.is_ready = False
        """It has imported all and takes requests."""
        self._unanswered: set[str] = set()

    def fileno(self) -> int:
        """Readable when there are answers."""
        return self._sock.fileno()

    def request(self, role: str, environ: Mapping[str, str], log_fd: int) -> None:
        """Ask for a role's process; if the server has ended, its end is the answer."""
        assert self.is_ready
        # Only now: what the script leaves behind is not ours to collect.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        data = json.dumps({"role": role, "environ": dict(environ)}).encode()
        self._unanswered.add(role)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._sock, [data], [log_fd])

    def answers(self) -> list[Forked | NotForked]:
        """What it has said since the last call. Look at `is_ready` after it."""
        found: list[Forked | NotForked] = []
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except (BlockingIOError, ConnectionResetError):
                break
            if not data:
                break
            body = json.loads(data)
            if "ready" in body:
                self.is_ready = True
                continue
            role = body["role"]
            self._unanswered.discard(role)
            found.append(Forked(role, body["pid"]) if "pid" in body else NotForked(role, body["error"]))
        if found and not self._unanswered:
            prctl(PR_SET_CHILD_SUBREAPER, 0)
        return found

    def close(self) -> bool:
        """Its process has ended. True: it may have been forking just then, so `collect_orphans` is to be called."""
        self._sock.close()
        return bool(self._unanswered)


def collect_orphans(known: Collection[int]) -> bool:
    """End and collect what a dead server was forking: it has become a child of ours that nobody has told us of.

    Args:
        known: pids of children that somebody else collects.

    Returns:
        Whether to call it again later. A process that ends leaves us its child before it can be collected, so nothing
        comes any more when nothing is found.
    """
    found = [pid for pid in children_named(PROCESS_NAME) if pid not in known]
    for pid in found:
        os.kill(pid, signal.SIGKILL)  # it is not collected, so its number is still its own
        os.waitpid(pid, os.WNOHANG)
    if not found:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
    return bool(found)


class ForkedProcess:
    """A child of ours that we have not started: what `subprocess.Popen` has for those that we have."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, once it has ended."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int:
        """The exit code; waits for it."""
        code = self._collect(0)
        assert code is not None
        return code

    def _collect(self, options: int) -> int | None:
        if self._returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # whoever has collected it knows how it ended; Popen says 0 too
                self._returncode = 0
                return 0
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode
