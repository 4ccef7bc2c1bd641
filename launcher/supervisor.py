"""Children of the launcher: started, ready or not by type, ended by a ladder, their ends explained.

    start -> RequestedProc -- the fork server says --> UnreadyProc -- ReadyMsg --> ReadyProc
      ^            |                                        |                          |
      |            +-- the server did not come to be        +---- the kernel says -----+--> Ended (expected or not)
      +---- the next incarnation, if the launcher wants one ----+

The ladder at the end: ask (ShutdownMsg), SIGTERM, SIGKILL. A child that is not ready does not read messages
yet, so it gets SIGTERM at once. Children start from the launcher's main thread only: their parent-death
signal is bound to that thread.

The fork server spares every child its imports. It starts with the first child and lives as long as the session. Where
it finds that forking is not safe, or once it has died, children are started without it, as they are with
RPRUNTIME_CHILD_COMMAND.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import rpruntime
from launcher.children import Ended, Proc, Process, ReadyProc, RequestedProc, UnreadyProc
from launcher.devices import Device
from launcher.ends import OomCounter, describe_end, last_lines
from launcher.forkserver import Forked, ForkedProcess, ForkServer, collect_orphans
from launcher.hangs import Process as Incarnation
from launcher.hangs import Sighting
from launcher.procstat import exiting_code, is_stopped
from launcher.session import SessionFolder
from rpruntime.process import EXIT_UNFIT
from rpruntime.status import Status, read, status_path
from rpruntime.wire.mailbox import socket_path

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

CHILD_COMMAND_VARIABLE = "RPRUNTIME_CHILD_COMMAND"
"""Replaces `python -m rpruntime.worker` and `.optimizer` (tests, debuggers)."""

_SLOW_EXIT_S = 0.3
"""A child that exits for so long has ended for us."""
_CORE_FILTER = "0x31"
"""The kernel's default without shared memory, of which a worker has mapped up to all that the session has."""
_ROOT = Path(rpruntime.__file__).resolve().parent.parent


class Supervisor:
    """Owns the children's processes and the pipe whose end tells them that the launcher is gone."""

    def __init__(
        self,
        folder: SessionFolder,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._environ = dict(environ)
        self._death_read, self._death_write = os.pipe()
        self._oom = OomCounter.read()
        # Why a child was sent SIGKILL by `kill`.
        self._killed_for: dict[str, str] = {}
        # Since when a child has been seen exiting, by pid.
        self._exiting_since: dict[int, float] = {}
        self._leaving: list[Process] = []
        self._server: ForkServer | None = None
        self._server_log_start = 0
        self._may_have_orphans = False
        """The fork server has died with requests in its hands."""
        self._wants_server = not self._environ.get(CHILD_COMMAND_VARIABLE)
        # Children that have ended before there was a process, to be reaped.
        self._unborn: list[Ended] = []
        self._has_started = False
        self.procs: dict[str, Proc] = {}
        self.stopping = False
        """From now on a child's end is expected."""

    def start(self, role: str, device: Device | None = None, incarnation: int = 1) -> Proc:
        """Start the process of a role; its output goes to its log."""
        log_file = self._log_file(role)
        with _open_log(log_file) as log:
            requested = RequestedProc(role, incarnation, device, log_file, log.seek(0, os.SEEK_END))
        if self._wants_server:
            self._wants_server = False
            self._server = ForkServer(self._start_server)
        if self._server is None:
            return self._start_alone(requested)
        self.procs[role] = requested
        if self._server.is_ready:
            self._request(self._server, requested)
        return requested

    def _start_alone(self, requested: RequestedProc) -> UnreadyProc:
        environ = self._child_environ(requested)
        with _open_log(requested.log_file) as log:
            return self._begun(requested, self._popen(self._command(requested.role), environ, log))

    def _start_server(self, environ: Mapping[str, str], fd: int) -> subprocess.Popen[bytes]:
        command = python_command("-m", "rpruntime.forkserver")
        with _open_log(self._log_file("forkserver")) as log:
            self._server_log_start = log.seek(0, os.SEEK_END)
            return self._popen(command, {**self._common_environ(), "CUDA_VISIBLE_DEVICES": "", **environ}, log, fd)

    def _popen(
        self, command: list[str], environ: Mapping[str, str], log: BinaryIO, *fds: int
    ) -> subprocess.Popen[bytes]:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            pass_fds=(self._death_read, *fds),
            start_new_session=True,  # so the terminal's Ctrl-C and hang-up do not reach it
        )
        with contextlib.suppress(OSError):  # it may have ended already
            Path(f"/proc/{popen.pid}/coredump_filter").write_text(_CORE_FILTER)  # what it forks inherits that
        return popen

    def _request(self, server: ForkServer, requested: RequestedProc) -> None:
        try:
            with _open_log(requested.log_file) as log:
                server.request(requested.role, self._own_environ(requested), log.fileno())
        except OSError as err:
            self._miscarry(requested, 1, str(err))

    def _begun(self, requested: RequestedProc, process: Process) -> UnreadyProc:
        role, device, log_file = requested.role, requested.device, requested.log_file
        proc = UnreadyProc(role, requested.incarnation, device, log_file, requested.log_start, process)
        self.procs[role] = proc
        self._has_started = True
        return proc

    def take_started(self) -> bool:
        """Whether a process has begun since the last call."""
        started, self._has_started = self._has_started, False
        return started

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that are readable when there is something to reap or a process has begun."""
        return () if self._server is None else (self._server.fileno(),)

    def _hear_server(self) -> None:
        """Take in what the fork server has said."""
        server = self._server
        if server is None:
            return
        was_ready = server.is_ready
        for answer in server.answers():
            requested = self.procs[answer.role]
            assert isinstance(requested, RequestedProc), requested
            if isinstance(answer, Forked):
                proc = self._begun(requested, ForkedProcess(answer.pid))
                if self.stopping:  # it was not there when the others were told
                    _kill_group(proc.pid, signal.SIGKILL)
            else:
                self._miscarry(requested, 1, answer.reason)
        if server.is_ready and not was_ready and not self.stopping:
            for requested in self._requested():
                self._request(server, requested)

    def _requested(self) -> list[RequestedProc]:
        return [proc for proc in self.procs.values() if isinstance(proc, RequestedProc)]

    def _miscarry(self, requested: RequestedProc, returncode: int, reason: str | None = None) -> None:
        del self.procs[requested.role]
        self._unborn.append(self._ended(requested, returncode, reason))

    def _reap_server(self) -> None:
        """If the fork server has ended, start what it owes, or tell of the end of those that have to end with it."""
        server = self._server
        if server is None or not _has_exited(server.process.pid):
            return
        self._hear_server()
        returncode = server.process.wait()
        self._may_have_orphans = server.close()
        self._server = None
        goes_on = (server.is_ready or returncode == EXIT_UNFIT) and not self.stopping
        for requested in self._requested():
            if goes_on and requested.role not in self._killed_for:
                try:
                    self._start_alone(requested)
                except OSError as err:  # the machine has no room for another process
                    self._miscarry(requested, 1, str(err))
            else:
                lines = last_lines(self._log_file("forkserver"), start=self._server_log_start)
                with _open_log(requested.log_file) as log:  # as it would have said it itself
                    log.write("".join(f"{line}\n" for line in lines).encode())
                self._miscarry(requested, returncode)

    def _log_file(self, role: str) -> Path:
        return Path(self._folder.config["log_dir"]) / f"{role}.log"

    def _command(self, role: str) -> list[str]:
        replaced = self._environ.get(CHILD_COMMAND_VARIABLE)
        if replaced:
            return shlex.split(replaced)
        module = "rpruntime.optimizer" if role == "optimizer" else "rpruntime.worker"
        return python_command("-m", module)

    def _child_environ(self, child: RequestedProc) -> dict[str, str]:
        return {**self._common_environ(), **self._own_environ(child)}

    def _common_environ(self) -> dict[str, str]:
        """The environment of all children, that of the fork server too."""
        environ = python_environ(self._environ)
        environ.pop("RPRUNTIME_SESSION", None)
        environ.update(
            RPRUNTIME_FOLDER=str(self._folder.path),
            RPRUNTIME_DEATH_FD=str(self._death_read),
            # What a killed process has printed must be in its log.
            PYTHONUNBUFFERED="1",
        )
        if not any(name in environ for name in _ALLOCATOR_SETTINGS):
            # slabs and activations of many sizes come and go: without it a third of the device is lost in gaps
            environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
        if self._folder.config.get("debug"):
            environ["RPRUNTIME_DEBUG"] = "1"
        return environ

    def _own_environ(self, child: RequestedProc) -> dict[str, str]:
        """What a child has in its environment beside that; nothing that a library reads when it is loaded."""
        return {
            "RPRUNTIME_FOLDER": str(self._folder.path),
            "RPRUNTIME_ROLE": child.role,
            "RPRUNTIME_INCARNATION": str(child.incarnation),
            "RPRUNTIME_DEVICE": child.device_name,
            "RPRUNTIME_LOG": str(child.log_file),
            # One device for a CUDA worker, none for the others: no context lands on a GPU by accident.
            "CUDA_VISIBLE_DEVICES": child.device.token if child.device is not None else "",
        }

    def on_ready(self, role: str, incarnation: int, info: dict[str, Any]) -> ReadyProc | None:
        """A child takes work; None if it is no child of ours, or an old one."""
        self._hear_server()  # which told of its pid before it could say anything
        proc = self.procs.get(role)
        if not isinstance(proc, UnreadyProc) or proc.incarnation != incarnation:
            return None
        known = (proc.device, proc.log_file, proc.log_start, proc.process)
        ready = ReadyProc(role, incarnation, *known, {**info, "incarnation": incarnation})
        self.procs[role] = ready
        return ready

    def ready(self) -> list[str]:
        """Roles that take work."""
        return [role for role, proc in self.procs.items() if isinstance(proc, ReadyProc)]

    def unready(self, *, replacements: bool) -> list[str]:
        """Roles whose first process is still starting, or whose replacement is."""
        return [
            role
            for role, proc in self.procs.items()
            if not isinstance(proc, ReadyProc) and (proc.incarnation > 1) == replacements
        ]

    def sightings(self) -> dict[Incarnation, Sighting]:
        """How the children look."""
        found: dict[Incarnation, Sighting] = {}
        for role, proc in self.procs.items():
            is_ready = isinstance(proc, ReadyProc)
            # A process that imports torch from a slow disk is silent for long; the launcher says what it waits for.
            status = read(self._status_path(proc)) if is_ready else None
            starting = not is_ready and proc.incarnation > 1
            stopped = not isinstance(proc, RequestedProc) and is_stopped(proc.pid)
            found[role, proc.incarnation] = Sighting(
                proc.who, stopped, status, starting, replaceable=proc.device is not None
            )
        return found

    def pages(self) -> list[Status | None]:
        """The status pages of all that take work, the optimizer's too."""
        return [read(self._status_path(proc)) for proc in self.procs.values() if isinstance(proc, ReadyProc)]

    def kill(self, role: str, reason: str) -> None:
        """SIGKILL a child; `reason` is why it has ended then."""
        self._hear_server()
        proc = self.procs.get(role)
        if proc is None:
            return
        self._killed_for[role] = reason
        if not isinstance(proc, RequestedProc):
            _kill_group(proc.pid, signal.SIGKILL)
        elif self._server is not None:  # it does not answer
            _kill_group(self._server.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """From now on every end is expected, and nothing is started any more."""
        self.stopping = True
        self._wants_server = False
        if self._server is not None:
            _kill_group(self._server.process.pid, signal.SIGKILL)

    def _status_path(self, proc: Proc) -> Path:
        return status_path(self._folder.path, proc.role, proc.incarnation)

    def reap(self) -> list[Ended]:
        """Children that have ended since the last call."""
        self._hear_server()
        self._reap_server()
        if self._may_have_orphans:
            processes = [proc.process for proc in self.procs.values() if not isinstance(proc, RequestedProc)]
            self._may_have_orphans = collect_orphans({process.pid for process in [*processes, *self._leaving]})
        self._leaving = [process for process in self._leaving if process.poll() is None]
        ended, self._unborn = self._unborn, []
        for role, proc in list(self.procs.items()):
            if isinstance(proc, RequestedProc):
                continue
            exited = _has_exited(proc.pid)
            returncode = 0 if exited else self._slowly_exiting(proc.pid)
            if returncode is None:
                continue
            # While it is a zombie its number is no other group's, so this hits only what it left behind.
            _kill_group(proc.pid, signal.SIGKILL)
            if exited:
                returncode = proc.process.wait()
            else:
                self._leaving.append(proc.process)
            self._exiting_since.pop(proc.pid, None)
            del self.procs[role]
            ended.append(self._ended(proc, returncode))
            # Nobody reads them any more: its page was read just now, its inbox lost its reader.
            self._status_path(proc).unlink(missing_ok=True)
            socket_path(self._folder.path, role, proc.incarnation).unlink(missing_ok=True)
        if ended:
            self._oom = OomCounter.read()
        return ended

    def _slowly_exiting(self, pid: int) -> int | None:
        """The exit code of a child whose end takes the kernel long; its work goes to others meanwhile."""
        code = exiting_code(pid)
        if code is None:
            return None
        now = self._clock()
        return code if now - self._exiting_since.setdefault(pid, now) >= _SLOW_EXIT_S else None

    def _ended(self, proc: Proc, returncode: int, reason: str | None = None) -> Ended:
        killed_for = self._killed_for.pop(proc.role, None)
        if killed_for is not None and returncode == -signal.SIGKILL:  # it may have ended by itself just before
            reason = killed_for
        elif reason is None:
            reason = describe_end(returncode, self._oom)
        return Ended(
            role=proc.role,
            incarnation=proc.incarnation,
            pid=None if isinstance(proc, RequestedProc) else proc.pid,
            device=proc.device_name,
            returncode=returncode,
            reason=reason,
            was_ready=isinstance(proc, ReadyProc),
            expected=self.stopping,
            log_file=proc.log_file,
            lines=tuple(last_lines(proc.log_file, start=proc.log_start)),
            status=read(self._status_path(proc)),
        )

    def signal_all(self, number: signal.Signals, *, unready_only: bool = False) -> None:
        """Send a signal to the children's groups."""
        for proc in self.procs.values():
            if isinstance(proc, UnreadyProc) or (isinstance(proc, ReadyProc) and not unready_only):
                _kill_group(proc.pid, number)

    @property
    def all_gone(self) -> bool:
        """Whether no child is there any more, nor one that is still exiting."""
        return not (self.procs or self._leaving or self._server is not None or self._may_have_orphans)

    def give_up(self) -> list[str]:
        """Forget the children that SIGKILL has not ended: they hang in the kernel. Returns their names."""
        names = [proc.who for proc in self.procs.values()]
        names += [f"process {process.pid}" for process in self._leaving]
        if self._server is not None:
            names.append(f"the fork server (pid {self._server.process.pid})")
            self._server.close()
            self._server = None
        self.procs.clear()
        self._leaving.clear()
        self._may_have_orphans = False
        return names

    def close(self) -> None:
        """Let go of the pipe; nothing is running any more."""
        assert self.all_gone, self.procs
        os.close(self._death_read)
        os.close(self._death_write)


def python_command(*words: str) -> list[str]:
    """This Python with these words. -P (3.11): no file of the user stands in for a module of ours."""
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), *words]


def python_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with PYTHONPATH such that `rpruntime` is found, also where it is not installed."""
    found = dict(environ)
    if _ROOT.name not in ("site-packages", "dist-packages"):
        parts = [part for part in found.get("PYTHONPATH", "").split(os.pathsep) if part]
        if str(_ROOT) not in parts:
            found["PYTHONPATH"] = os.pathsep.join([*parts, str(_ROOT)])
    return found


def _open_log(file: Path) -> BinaryIO:
    """A log, to add to it. What the script prints in a worker is its user's business."""
    return open(file, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))


def _has_exited(pid: int) -> bool:
    """Whether a child is a zombie; it stays one."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
