"""Children of the launcher: started, ready or not by type, ended by a ladder, their ends explained.

    start -> UnreadyProc -- ReadyMsg --> ReadyProc
      ^          |                          |
      |          +---- the kernel says -----+--> Ended (expected or not)
      +---- the next incarnation, if the launcher wants one ----+

The ladder at the end: ask (ShutdownMsg), SIGTERM, SIGKILL. A child that is not ready does not read messages
yet, so it gets SIGTERM at once. Children start from the launcher's main thread only: their parent-death
signal is bound to that thread.
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
from typing import Any

import rpruntime
from launcher.children import Ended, Proc, ReadyProc, UnreadyProc
from launcher.devices import Device
from launcher.ends import OomCounter, describe_end, last_lines
from launcher.hangs import Process, Sighting
from launcher.procstat import exiting_code, is_stopped
from launcher.session import SessionFolder
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
        self._leaving: list[subprocess.Popen[bytes]] = []
        self.procs: dict[str, Proc] = {}
        self.stopping = False
        """From now on a child's end is expected."""

    def start(self, role: str, device: Device | None = None, incarnation: int = 1) -> UnreadyProc:
        """Start the process of a role; its output goes to its log."""
        log_file = self._log_file(role)
        # What the script prints in a worker is its user's business.
        with open(log_file, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            log_start = log.seek(0, os.SEEK_END)
            popen = subprocess.Popen(
                self._command(role),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._child_environ(role, device, incarnation),
                pass_fds=(self._death_read,),
                start_new_session=True,  # so the terminal's Ctrl-C and hang-up do not reach it
            )
        with contextlib.suppress(OSError):  # it may have ended already
            Path(f"/proc/{popen.pid}/coredump_filter").write_text(_CORE_FILTER)
        proc = UnreadyProc(role, incarnation, device, popen, log_file, log_start)
        self.procs[role] = proc
        return proc

    def _log_file(self, role: str) -> Path:
        return Path(self._folder.config["log_dir"]) / f"{role}.log"

    def _command(self, role: str) -> list[str]:
        replaced = self._environ.get(CHILD_COMMAND_VARIABLE)
        if replaced:
            return shlex.split(replaced)
        module = "rpruntime.optimizer" if role == "optimizer" else "rpruntime.worker"
        return python_command("-m", module)

    def _child_environ(self, role: str, device: Device | None, incarnation: int) -> dict[str, str]:
        environ = python_environ(self._environ)
        environ.pop("RPRUNTIME_SESSION", None)
        environ.update(
            RPRUNTIME_FOLDER=str(self._folder.path),
            RPRUNTIME_ROLE=role,
            RPRUNTIME_INCARNATION=str(incarnation),
            RPRUNTIME_DEATH_FD=str(self._death_read),
            RPRUNTIME_DEVICE=device.name if device is not None else "",
            RPRUNTIME_LOG=str(self._log_file(role)),
            # One device for a CUDA worker, none for the others: no context lands on a GPU by accident.
            CUDA_VISIBLE_DEVICES=device.token if device is not None else "",
            # What a killed process has printed must be in its log.
            PYTHONUNBUFFERED="1",
        )
        if device is not None and not any(name in environ for name in _ALLOCATOR_SETTINGS):
            # slabs and activations of many sizes come and go: without it a third of the device is lost in gaps
            environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
        if self._folder.config.get("debug"):
            environ["RPRUNTIME_DEBUG"] = "1"
        return environ

    def on_ready(self, role: str, incarnation: int, info: dict[str, Any]) -> ReadyProc | None:
        """A child takes work; None if it is no child of ours, or an old one."""
        proc = self.procs.get(role)
        if not isinstance(proc, UnreadyProc) or proc.incarnation != incarnation:
            return None
        known = (proc.device, proc.popen, proc.log_file, proc.log_start)
        ready = ReadyProc(role, incarnation, *known, {**info, "incarnation": incarnation})
        self.procs[role] = ready
        return ready

    def unready(self, *, replacements: bool) -> list[str]:
        """Roles whose first process is still starting, or whose replacement is."""
        return [
            role
            for role, proc in self.procs.items()
            if isinstance(proc, UnreadyProc) and (proc.incarnation > 1) == replacements
        ]

    def sightings(self) -> dict[Process, Sighting]:
        """How the children look."""
        found: dict[Process, Sighting] = {}
        for role, proc in self.procs.items():
            is_ready = isinstance(proc, ReadyProc)
            # A process that imports torch from a slow disk is silent for long; the launcher says what it waits for.
            status = read(self._status_path(proc)) if is_ready and proc.device is not None else None
            starting = not is_ready and proc.incarnation > 1
            found[role, proc.incarnation] = Sighting(proc.who, is_stopped(proc.popen.pid), status, starting)
        return found

    def pages(self) -> list[Status | None]:
        """The status pages of all that take work, the optimizer's too."""
        return [read(self._status_path(proc)) for proc in self.procs.values() if isinstance(proc, ReadyProc)]

    def kill(self, role: str, reason: str) -> None:
        """SIGKILL a child; `reason` is why it has ended then."""
        self._killed_for[role] = reason
        _kill_group(self.procs[role].popen.pid, signal.SIGKILL)

    def _status_path(self, proc: Proc) -> Path:
        return status_path(self._folder.path, proc.role, proc.incarnation)

    def reap(self) -> list[Ended]:
        """Children that have ended since the last call."""
        self._leaving = [popen for popen in self._leaving if popen.poll() is None]
        ended = []
        for role, proc in list(self.procs.items()):
            exited = _has_exited(proc.popen.pid)
            returncode = 0 if exited else self._slowly_exiting(proc.popen.pid)
            if returncode is None:
                continue
            # While it is a zombie its number is no other group's, so this hits only what it left behind.
            _kill_group(proc.popen.pid, signal.SIGKILL)
            if exited:
                returncode = proc.popen.wait()
            else:
                self._leaving.append(proc.popen)
            self._exiting_since.pop(proc.popen.pid, None)
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

    def _ended(self, proc: Proc, returncode: int) -> Ended:
        killed_for = self._killed_for.pop(proc.role, None)
        if killed_for is None or returncode != -signal.SIGKILL:  # it may have ended by itself just before
            reason = describe_end(returncode, self._oom)
        else:
            reason = killed_for
        return Ended(
            role=proc.role,
            incarnation=proc.incarnation,
            pid=proc.popen.pid,
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
            if not unready_only or isinstance(proc, UnreadyProc):
                _kill_group(proc.popen.pid, number)

    @property
    def all_gone(self) -> bool:
        """Whether no child is there any more, nor one that is still exiting."""
        return not self.procs and not self._leaving

    def give_up(self) -> list[str]:
        """Forget the children that SIGKILL has not ended: they hang in the kernel. Returns their names."""
        names = [proc.who for proc in self.procs.values()]
        names += [f"process {popen.pid}" for popen in self._leaving]
        self.procs.clear()
        self._leaving.clear()
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


def _has_exited(pid: int) -> bool:
    """Whether a child is a zombie; it stays one."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
