"""The launcher: owns a session's folder, its children, its segments and its mailbox, in one loop.

    signals, ends of children --wake pipe--+
    messages (mailbox)  -------------------+--> turn() --> messages to the controller, lines on the screen
    end of the watched script (pidfd)  ----+

`rplaunch` uses it and starts the script; `launcher.serve` is what a script under plain python starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import time
from dataclasses import replace
from typing import Any

from launcher.children import Ended, ReadyProc, RequestedProc
from launcher.ends import note_end, says_why, without_log_prefix
from launcher.hangs import HangWatch, Kill
from launcher.plan import Plan
from launcher.restarts import Deaths, Follows, Lost, Restart, Retire, died_msg
from launcher.screen import LogFollower, Screen, WaitNotice
from launcher.session import SessionFolder
from launcher.succession import RESET_TIMEOUT_S, Holder, Succession
from launcher.supervisor import Supervisor
from launcher.wakeup import Wakeup
from rpruntime.process import EXIT_START_FAILED, open_pidfd, start_time
from rpruntime.store.segments import SegmentServer, remove_stale_names
from rpruntime.wire.mailbox import Mailbox, new_keys
from rpruntime.wire.messages import (
    PROTOCOL_VERSION,
    AttachedMsg,
    AttachMsg,
    HelloMsg,
    ReadyMsg,
    RefusedMsg,
    RoleDiedMsg,
    RoleReadyMsg,
    ShutdownMsg,
    StartFailedMsg,
)
from rpruntime.wire.succession import ControllerGoneMsg, DetachMsg, ResetDoneMsg, ResetMsg, SettledMsg

_TICK_S = 0.2
_REASON_WAIT_S = 0.5
# The ladder ends within 5 s of the script's end: nothing may outlive that, whatever the script's own grace.
_ASK_S, _TERM_S = 2.5, 1.0


STOPPED = "its launcher was told to end it (rpctl stop, Ctrl-C, SIGTERM)"


class Launcher:
    """A running session, from the launcher's side. Use from the main thread."""

    def __init__(self, plan: Plan, folder: SessionFolder, screen: Screen, wakeup: Wakeup) -> None:
        self._plan = plan
        self._screen = screen
        self._wakeup = wakeup
        self.folder = folder
        folder.keys = new_keys()
        folder.save()
        remove_stale_names()
        self._segments: SegmentServer | None = None
        self._mailbox: Mailbox | None = None
        self._supervisor = Supervisor(self.folder)
        self._notice = WaitNotice(screen)
        # The run goes on meanwhile, and the line about the death has said that a replacement starts.
        self._replacement_notice = WaitNotice(screen, "the replacement of ", (10.0, 20.0, 40.0))
        self._deaths = Deaths(plan.config["max_restarts"])
        self._hangs = HangWatch(plan.config["hang_timeout"])
        self._follower = LogFollower(screen)
        self._succession = Succession()
        self._controller_fd = -1
        """Readable when the controller's process has ended; -1: none is attached, or the kernel has no such thing."""
        self._waiting: AttachMsg | None = None
        """Who wants the controller's place as soon as everybody has been reset."""
        self._late: dict[str, int] = {}
        """Roles that became ready after a controller had gone and have not answered their reset; its number.

        The number that they answer with may be lower than that of a controller that was let in meanwhile.
        """
        # Why a process could not start, in its own words, by role and incarnation.
        self._failed_reasons: dict[tuple[str, int], str] = {}
        self.shutdown_asked = False
        self.why_it_ends = "its launcher ends"

    def start(self) -> None:
        """Serve segments and messages, and start the children."""
        host_memory = self._plan.config["host_memory"]
        self._segments = SegmentServer(self.folder.path, self.folder.token, override_gib=host_memory)
        self._mailbox = Mailbox(self.folder.path, "launcher", 1, self.folder.keys)
        tee = self._plan.config["tee"]
        for role, device in self._plan.roles:
            proc = self._supervisor.start(role, device)
            if tee == "all" or (tee == "workers" and role != "optimizer"):
                self._follower.add(role, proc.log_file)
        self._save()

    def turn(self, extra_fds: tuple[int, ...] = (), timeout_s: float = _TICK_S) -> set[int]:
        """One round of the loop; returns those of `extra_fds` that are readable."""
        assert self._mailbox is not None
        # The mailbox's descriptor tells of changes only: what came in between is read first.
        self._read_mail()  # which may end the controller's time, and close its descriptor
        own = (self._controller_fd,) if self._controller_fd >= 0 else ()
        watched = [self._wakeup.read_fd, self._mailbox.fileno(), *self._supervisor.filenos(), *own, *extra_fds]
        try:
            readable, _, _ = select.select(watched, [], [], timeout_s)
        except InterruptedError:
            readable = []
        self._wakeup.drain()
        self._read_mail()
        for ended in self._supervisor.reap():
            self._on_ended(ended)
        if self._supervisor.take_started():
            self._save()
        if not self._supervisor.stopping:
            self._watch_controller(ended=self._controller_fd in readable)
            now, ready = time.monotonic(), self._supervisor.ready()
            self._notice.tick(now, self._supervisor.unready(replacements=False), ready)
            self._replacement_notice.tick(now, self._supervisor.unready(replacements=True), ready)
            if self._hangs.is_due():
                self._look_for_hangs()
        self._follower.copy()
        return set(extra_fds) & set(readable)

    @property
    def lost(self) -> str:
        """The part without which nobody can use the session any more; "": it can be used, or a script holds it."""
        if self._succession.holder is not None:
            return ""
        procs = self._supervisor.procs
        if "optimizer" not in procs:
            return "optimizer"
        return "" if any(proc.device is not None for proc in procs.values()) else "last worker"

    def end(self, *, at_once: bool = False) -> None:
        """End all children, by the ladder or at once, and remove the folder's content except logs."""
        self._supervisor.stop()
        if self._mailbox is not None:
            self._run_ladder(at_once)
            self._mailbox.close()
        if self._segments is not None:
            self._segments.close()
        self._follower.copy(last=True)
        self._supervisor.close()
        for line in self._deaths.restarts():
            self._screen.say(f"rpruntime: {line}")
        for line in self._deaths.casualties():
            self._screen.warn(f"rpruntime: {line}")
        self.folder.remove()

    def _run_ladder(self, at_once: bool) -> None:
        grace = float(self._plan.config["shutdown_timeout"])
        supervisor = self._supervisor
        rungs: list[tuple[str, float]] = [
            ("ask", min(grace, _ASK_S)),
            ("term", min(grace, _TERM_S)),
            ("kill", 5.0),
        ]
        for rung, wait_s in rungs[2:] if at_once else rungs:
            if rung == "ask":
                assert self._mailbox is not None
                if not self.shutdown_asked:
                    self._tell_controller(ShutdownMsg(self.why_it_ends))
                for role, proc in supervisor.procs.items():
                    if isinstance(proc, ReadyProc):
                        self._mailbox.send(role, ShutdownMsg("the session ends"))
                supervisor.signal_all(signal.SIGTERM, unready_only=True)
            else:
                supervisor.signal_all(signal.SIGTERM if rung == "term" else signal.SIGKILL)
            deadline = time.monotonic() + wait_s
            while not supervisor.all_gone and time.monotonic() < deadline:
                self.turn(timeout_s=max(0.0, min(_TICK_S, deadline - time.monotonic())))
                if rung != "kill" and any(number == signal.SIGINT for number, _ in self._wakeup.take()):
                    break  # somebody is in a hurry: next rung
            if supervisor.all_gone:
                return
        # Only a process in uninterruptible sleep gets here; its end is the kernel's.
        for who in supervisor.give_up():
            self._screen.warn(f"rpruntime: {who} cannot be killed, it hangs in the kernel")

    def _read_mail(self) -> None:
        assert self._mailbox is not None
        for msg in self._mailbox.receive():
            self._on_message(msg)

    def _on_message(self, msg: Any) -> None:
        assert self._mailbox is not None
        if isinstance(msg, HelloMsg):
            if msg.protocol != PROTOCOL_VERSION:
                self._refuse(msg)
        elif isinstance(msg, ReadyMsg):
            refused = (msg.role, msg.incarnation) in self._failed_reasons
            ready = None if refused else self._supervisor.on_ready(msg.role, msg.incarnation, msg.info)
            if ready is not None:
                self._save()
                self._on_ready(ready)
        elif isinstance(msg, StartFailedMsg):
            self._failed_reasons[msg.role, msg.incarnation] = msg.reason
        elif isinstance(msg, AttachMsg):
            self._on_attach(msg)
        elif isinstance(msg, ShutdownMsg):
            self.shutdown_asked = True
        elif isinstance(msg, DetachMsg):
            if self._succession.holder is not None and self._succession.holder.incarnation == msg.incarnation:
                self._on_controller_gone()
            elif self._waiting is not None and self._waiting.incarnation == msg.incarnation:
                self._waiting = None  # it waits no longer
        elif isinstance(msg, SettledMsg):
            if self._succession.phase == "settling" and msg.incarnation == self._succession.floor - 1:
                self._begin_reset()
        elif isinstance(msg, ResetDoneMsg):
            self._on_reset_done(msg)

    def _refuse(self, msg: HelloMsg) -> None:
        """End a child of another version: it may not understand that it is to end, and would say that it is ready."""
        proc = self._supervisor.procs.get(msg.role)
        if proc is not None and proc.incarnation == msg.incarnation:
            self._failed_reasons[msg.role, msg.incarnation] = _protocol_reason(msg.protocol)
            self._supervisor.kill(msg.role, _protocol_reason(msg.protocol))

    def _on_attach(self, msg: AttachMsg) -> None:
        assert self._mailbox is not None
        if msg.protocol != PROTOCOL_VERSION:
            self._mailbox.send("controller", RefusedMsg(_protocol_reason(msg.protocol)))
            return
        holder = self._succession.holder
        if holder is not None and holder.incarnation == msg.incarnation:
            self._greet()
            return
        if holder is not None:  # it has let go of its lock, so it has ended or detached
            self._on_controller_gone()
        self._waiting = msg
        self._let_in()

    def _let_in(self) -> None:
        """Who waits for the controller's place gets it, if everybody has been reset."""
        msg, succession = self._waiting, self._succession
        if msg is None or succession.phase != "clean" or self._mailbox is None:
            return
        self._waiting = None
        started = start_time(msg.pid)
        if started is None:  # it has ended while it waited
            return
        succession.attach(Holder(msg.incarnation, msg.pid, started, tuple(msg.argv), time.time()))
        with contextlib.suppress(ProcessLookupError):
            self._controller_fd = open_pidfd(msg.pid)
        self._greet()
        self._save()

    def _greet(self) -> None:
        """Tell the controller that the place is its own, and who is there."""
        assert self._mailbox is not None
        procs = self._supervisor.procs
        ready = {r: p.info for r, p in procs.items() if isinstance(p, ReadyProc) and r not in self._late}
        names = tuple(device.name for device in self._plan.devices)
        known, retired = self._succession.known, self._succession.retired
        self._mailbox.send(
            "controller", AttachedMsg(self.folder.name, names, ready, self.folder.config, dict(known), retired)
        )
        for role, proc in procs.items():
            if proc.incarnation > known.get(role, 1):  # everybody has to be told to write to the present process
                self._tell_controller(RoleDiedMsg(role, proc.incarnation - 1, 0, "died earlier", restarts=True))
                if isinstance(proc, ReadyProc) and role not in self._late:
                    self._tell_controller(RoleReadyMsg(role, proc.incarnation, proc.info))
        for died in self._deaths.messages():
            if died.role not in retired:
                self._tell_controller(died)

    def _on_ready(self, proc: ReadyProc) -> None:
        """A process takes work; one that started while controllers changed is told of it first."""
        succession = self._succession
        if succession.phase == "clean" and not succession.known:
            self._tell_controller(RoleReadyMsg(proc.role, proc.incarnation, proc.info))
            return
        self._late[proc.role] = succession.floor
        if succession.phase == "resetting":
            succession.waits_for.add(proc.role)
        if succession.phase != "settling":  # else it is told with the others
            self._tell_to_reset(proc.role)

    def _tell_to_reset(self, role: str) -> None:
        assert self._mailbox is not None
        succession = self._succession
        roles = {r: p.incarnation for r, p in self._supervisor.procs.items() if p.device is not None}
        if role in self._late:
            self._late[role] = succession.floor
        self._mailbox.send(role, ResetMsg(succession.floor, roles, succession.retired))

    def _watch_controller(self, *, ended: bool) -> None:
        """Notice the controller's end, and let a reset go on."""
        succession = self._succession
        holder = succession.holder
        if holder is not None and (ended or (self._controller_fd < 0 and start_time(holder.pid) != holder.start_time)):
            self._on_controller_gone()
        if succession.phase == "settling" and succession.is_stuck(self._supervisor.pages()):
            self._begin_reset()
        for role in succession.overdue():
            self._supervisor.kill(role, f"it did not let go of its work within {RESET_TIMEOUT_S:g} s")

    def _on_controller_gone(self) -> None:
        assert self._mailbox is not None
        if self._controller_fd >= 0:
            os.close(self._controller_fd)
            self._controller_fd = -1
        left = self._succession.leave()
        self._mailbox.send("optimizer", ControllerGoneMsg(left.incarnation))
        self._save()

    def _begin_reset(self) -> None:
        procs = self._supervisor.procs
        ready = self._supervisor.ready()
        present = {role: proc.incarnation for role, proc in procs.items() if proc.device is not None}
        retired = [role for role, _ in self._plan.roles if role not in procs and role != "optimizer"]
        self._succession.begin_reset(ready, present, retired)
        for role in ready:
            if role != "optimizer":
                self._tell_to_reset(role)
        self._reset_optimizer()

    def _reset_optimizer(self) -> None:
        """The last one to reset: until then workers may read what it is going to free."""
        if self._succession.is_optimizers_turn():
            self._tell_to_reset("optimizer")

    def _on_reset_done(self, msg: ResetDoneMsg) -> None:
        if self._late.get(msg.role) == msg.incarnation:
            del self._late[msg.role]
            proc = self._supervisor.procs.get(msg.role)
            if isinstance(proc, ReadyProc):
                self._tell_controller(RoleReadyMsg(proc.role, proc.incarnation, proc.info))
        if msg.incarnation == self._succession.floor:
            self._on_answered(msg.role)

    def _on_answered(self, role: str) -> None:
        """A role has reset, or is no more."""
        if self._succession.answered(role):
            self._after_reset()
        else:
            self._reset_optimizer()

    def _after_reset(self) -> None:
        """Memory of everybody who is no more goes, and the next controller comes."""
        assert self._segments is not None
        living = {f"{role}.{proc.incarnation}" for role, proc in self._supervisor.procs.items()}
        for owner in set(self._segments.segments().values()) - living:
            self._segments.release_owner(owner)
        for path in self.folder.path.glob("controller.*.sock"):  # a killed one has left its own
            if int(path.name.split(".")[1]) < self._succession.floor:
                path.unlink(missing_ok=True)
        self._let_in()

    def _on_ended(self, ended: Ended) -> None:
        if ended.expected:
            return
        ended = replace(ended, reason=self._reason_of(ended))
        follows = Lost() if self.shutdown_asked else self._deaths.judge(ended)
        if isinstance(follows, Restart):
            follows = self._restart(ended, follows)
        note_end(ended.log_file, f"{ended.who} ended: {ended.reason}")
        self._deaths.note(ended, follows)
        self._late.pop(ended.role, None)
        self._on_answered(ended.role)
        self._save()
        others = any(proc.device is not None for proc in self._supervisor.procs.values())
        self._screen.warn(f"rpruntime: {self._deaths.line(ended, follows, others=others)}")
        self._tell_controller(died_msg(ended, follows))  # after the line, as the controller says what is redone
        if isinstance(follows, Lost) and not ended.was_ready:
            for line in ended.lines:
                self._screen.warn(f"  {line}")

    def _restart(self, ended: Ended, follows: Restart) -> Follows:
        assert self._mailbox is not None
        device, incarnation = dict(self._plan.roles)[ended.role], ended.incarnation + 1
        try:
            self._supervisor.start(ended.role, device, incarnation)
        except OSError as err:  # the machine has no room for another process
            self._screen.warn(f"rpruntime: no replacement of {ended.role} can be started: {err}")
            return Retire(follows.num_recent)
        self._mailbox.meet(ended.role, incarnation)
        return follows

    def _reason_of(self, ended: Ended) -> str:
        key = (ended.role, ended.incarnation)
        if ended.returncode == EXIT_START_FAILED:
            self._wait_for_reason(key)
        told = self._failed_reasons.pop(key, None)
        if told is not None:
            return told
        if ended.returncode > 0 and ended.lines and says_why(ended.lines[-1]):
            return f"{ended.reason}: {without_log_prefix(ended.lines[-1])}"
        return ended.reason

    def _wait_for_reason(self, key: tuple[str, int]) -> None:
        """Its reason was sent before it ended, so it is here or about to be."""
        assert self._mailbox is not None
        deadline = time.monotonic() + _REASON_WAIT_S
        while key not in self._failed_reasons and time.monotonic() < deadline:
            for msg in self._mailbox.receive(0.05):
                self._on_message(msg)

    def _look_for_hangs(self) -> None:
        for (role, _), verdict in self._hangs.look(self._supervisor.sightings()):
            if isinstance(verdict, Kill):
                self._supervisor.kill(role, verdict.reason)
            else:
                self._screen.warn(f"rpruntime: {verdict.text}")

    def _tell_controller(self, msg: Any) -> None:
        if self._succession.holder is not None and self._mailbox is not None:
            self._mailbox.send("controller", msg)

    def _save(self) -> None:
        self.folder.roles = {
            role: {
                "pid": None if isinstance(proc, RequestedProc) else proc.pid,
                "incarnation": proc.incarnation,
                "device": proc.device_name,
                "state": "ready" if isinstance(proc, ReadyProc) else "starting",
            }
            for role, proc in self._supervisor.procs.items()
        }
        self.folder.roles.update(self._deaths.rows())
        holder = self._succession.holder
        self.folder.controller = None if holder is None else dataclasses.asdict(holder)
        self.folder.save()


def _protocol_reason(theirs: int) -> str:
    return f"protocol version {theirs} does not fit {PROTOCOL_VERSION}: two versions of rpruntime are mixed"
