"""Restart or retire, hang or not: the launcher's decisions, with a clock that tests move."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.children import Ended, UnreadyProc
from launcher.devices import Device
from launcher.ends import describe_place
from launcher.hangs import LOOK_S, HangWatch, Kill, Say, Sighting
from launcher.procstat import exiting_code, is_stopped
from launcher.restarts import WINDOW_S, Deaths, Lost, Restart, RestartPolicy, Retire, died_msg
from launcher.screen import Screen, WaitNotice
from launcher.session import create_session
from launcher.supervisor import CHILD_COMMAND_VARIABLE, Supervisor, _has_exited
from rpruntime import flags
from rpruntime.status import Status
from rpruntime.wire.messages import RoleDiedMsg
from tests.leaks import wait_until


class Clock:
    """Seconds that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


MOVING = Status(heartbeat_ns=1, busy=True, progress=1, slot=12, layer=3, microbatch=1, phase="backward")


# --- restarts


def test_a_device_that_dies_three_times_within_ten_minutes_is_retired() -> None:
    clock = Clock()
    policy = RestartPolicy(flags.settings({}, {})["max_restarts"], clock)
    assert policy.on_death("worker-0") == Restart(1)
    clock.now += 300
    assert policy.on_death("worker-0") == Restart(2)
    assert policy.on_death("worker-1") == Restart(1), "each device has its own count"
    clock.now += 299.9
    assert policy.on_death("worker-0") == Retire(3)


def test_old_deaths_do_not_count() -> None:
    clock = Clock()
    policy = RestartPolicy(2, clock)
    for _ in range(20):
        clock.now += WINDOW_S / 2
        assert policy.on_death("worker-0") in (Restart(1), Restart(2))


def test_without_restarts_the_first_death_retires() -> None:
    assert RestartPolicy(0, Clock()).on_death("worker-0") == Retire(1)


def ended(role: str = "worker-0", **more: Any) -> Ended:
    """A death, by default of a worker that was ready."""
    device = "" if role == "optimizer" else role.replace("worker-", "cpu:")
    values = {
        "role": role, "incarnation": 1, "pid": 77, "device": device, "returncode": -9, "reason": "killed by signal 9",
        "was_ready": True, "expected": False, "log_file": Path("x.log"), "lines": (), "status": None,
    }  # fmt: skip
    return Ended(**{**values, **more})


@pytest.mark.parametrize(
    "death, follows",
    [
        (ended(), Restart(1)),
        (ended(incarnation=2), Restart(1)),
        (ended(incarnation=2, was_ready=False), Restart(1)),
        (ended(was_ready=False), Restart(1)),
        (ended(was_ready=False, returncode=4), Lost()),
        (ended(was_ready=False, returncode=1), Lost()),
        (ended("optimizer"), Lost()),
        (ended("optimizer", was_ready=False), Lost()),
    ],
)
def test_what_follows(death: Ended, follows: object) -> None:
    assert Deaths(2, Clock()).judge(death) == follows


def test_what_is_told_of_a_death() -> None:
    deaths = Deaths(1, Clock())
    first = ended(status=MOVING)
    assert deaths.judge(first) == Restart(1)
    deaths.note(first, Restart(1))
    assert deaths.line(first, Restart(1), others=True) == (
        "worker-0 on cpu:0 (pid 77) died: killed by signal 9, in backward of layer 3, micro-batch 2 (slot 12); "
        "a replacement is starting (restart 1 of 1 in ten minutes)"
    )
    reason = "killed by signal 9"
    assert died_msg(first, Restart(1)) == RoleDiedMsg("worker-0", 1, 77, reason, True, (12,), "backward", 3, 1)
    assert (deaths.messages(), deaths.rows(), deaths.casualties()) == ([], {}, [])
    assert deaths.restarts() == ["worker-0 was restarted once"]

    second = ended(incarnation=2, was_ready=False, reason="no such GPU")
    assert deaths.judge(second) == Retire(2)
    deaths.note(second, Retire(2))
    line = "worker-0 on cpu:0 (pid 77) did not start: no such GPU; cpu:0 is retired (--max-restarts), "
    assert deaths.line(second, Retire(2), others=True) == line + "the run goes on without it; log x.log"
    assert deaths.line(second, Retire(2), others=False) == line + "no device is left; log x.log"
    optimizer = ended("optimizer")
    deaths.note(optimizer, deaths.judge(optimizer))
    line = "optimizer (pid 77) died: killed by signal 9; its update may be half done, so the run ends"
    assert deaths.line(optimizer, Lost(), others=True) == line
    assert [msg.role for msg in deaths.messages()] == ["worker-0", "optimizer"]
    assert not any(msg.restarts for msg in deaths.messages())
    states = {role: (row["state"], row["reason"]) for role, row in deaths.rows().items()}
    assert states == {"worker-0": ("retired", "no such GPU"), "optimizer": ("ended", "killed by signal 9")}
    assert deaths.casualties() == [
        "worker-0 on cpu:0 (pid 77) was retired: no such GPU; log x.log",
        "optimizer (pid 77) ended early: killed by signal 9; log x.log",
    ]


def test_one_that_was_never_started_has_no_pid() -> None:
    death = ended(pid=None, was_ready=False, returncode=1, reason="no process can be forked")
    deaths = Deaths(2)
    assert deaths.line(death, Lost(), others=True) == "worker-0 on cpu:0 did not start: no process can be forked"
    deaths.note(death, Lost())
    assert deaths.rows()["worker-0"]["pid"] is None
    assert deaths.casualties() == ["worker-0 on cpu:0 ended early: no process can be forked; log x.log"]
    msg = died_msg(death, Lost())
    assert (msg.pid, msg.who) == (0, "worker-0")
    assert died_msg(ended(), Restart(1)).who == "worker-0 (pid 77)"


def test_a_place_is_said_once() -> None:
    reason = "made no progress for 300 s (it was in backward of layer 3, micro-batch 2 (slot 12)), so it was killed"
    assert Deaths(2).line(ended(reason=reason, status=MOVING), Restart(1), others=True).count("backward") == 1


# --- waiting


def test_each_wait_is_said_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    screen = Screen()
    monkeypatch.setattr(screen, "say", said.append)
    notice = WaitNotice(screen, "the replacement of ", (10.0, 20.0))
    for now in range(100, 170):
        notice.tick(float(now), ["worker-1"], [])
    assert said == [f"waiting for the replacement of worker-1 to start ({n} s)" for n in (10, 20, 40, 60)]
    said.clear()
    notice.tick(170.0, [], ["worker-0", "worker-1"])
    assert said == ["the replacement of worker-1 started after 70 s"]
    said.clear()
    for now in range(200, 220):
        notice.tick(float(now), ["worker-0", "worker-1"], [])
    assert said == ["waiting for the replacement of worker-0, worker-1 to start (10 s)"]
    said.clear()
    notice.tick(220.0, [], [])
    assert said == [], "both have died"
    for tenth in range(10):
        notice.tick(230.0 + tenth, ["worker-0"], [])
    notice.tick(239.9, [], ["worker-0"])
    assert said == [], "a short wait is not told of"


def test_a_start_is_never_silent_for_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [100.0]
    screen = Screen()
    now = 100.0
    monkeypatch.setattr(screen, "say", lambda line: times.append(now))
    notice = WaitNotice(screen)
    for tick in range(161):
        now = 100.0 + tick / 16
        notice.tick(now, ["optimizer", "worker-0"] if tick < 149 else [], ["optimizer"])
    assert now == 110.0 and times[-1] == 109.3125
    assert max(b - a for a, b in itertools.pairwise(times)) < 2.0


# --- hangs


class Watched:
    """One process under watch; its heartbeat and progress move unless a test says otherwise."""

    def __init__(self, timeout_s: float = 300.0, *, replaceable: bool = True) -> None:
        self.replaceable = replaceable
        self.clock = Clock()
        self.watch = HangWatch(timeout_s, self.clock)
        self.count = 0
        self.beats = self.moves = self.busy = True
        self.stopped = self.starting = False
        self.step()

    def step(self, seconds: float = LOOK_S) -> list[Say | Kill]:
        """A look after so many seconds."""
        self.clock.now += seconds
        self.count += 1
        heartbeat = self.count if self.beats and not self.stopped else 0
        progress = self.count if self.moves and not self.stopped else 0
        status = Status(heartbeat, self.busy, progress, 0, 12, 3, 1, "backward")
        sighting = Sighting(
            "worker-1", self.stopped, None if self.starting else status, self.starting, self.replaceable
        )
        found = self.watch.look({("worker-1", 1): sighting})
        assert all(key == ("worker-1", 1) for key, _ in found)
        return [verdict for _, verdict in found]

    def run(self, seconds: int) -> dict[int, Say | Kill]:
        """What was said and when, in seconds from now."""
        return {second: verdict for second in range(1, seconds + 1) for verdict in self.step()}


def test_who_moves_is_left_alone() -> None:
    seen = Watched()
    assert seen.run(1000) == {}
    seen.busy = seen.moves = False
    assert seen.run(1000) == {}, "an idle worker has no progress to make"


def test_a_busy_worker_without_progress() -> None:
    seen = Watched()
    seen.moves = False
    found = seen.run(301)
    assert list(found) == [151, 301], "one look to see that it stands, then half of the timeout and all of it"
    said, killed = found.values()
    assert isinstance(said, Say)
    place = r"\(it was in backward of layer 3, micro-batch 2 \(slot 12\)\)"
    pattern = r"worker-1 made no progress for 150 s, since \d\d:\d\d:\d\d "
    assert re.fullmatch(pattern + place + r"; it will be killed after 300 s \(--hang-timeout\)", said.text), said
    assert isinstance(killed, Kill)
    assert re.fullmatch("made no progress for 300 s " + place + ", so it was killed", killed.reason)


def test_a_stopped_worker_also_if_idle() -> None:
    seen = Watched()
    seen.stopped, seen.busy = True, False
    found = seen.run(300)
    assert list(found) == [10, 300]
    said, killed = found.values()
    assert isinstance(said, Say) and "worker-1 was stopped (SIGSTOP?) for 10 s" in said.text
    assert killed == Kill("was stopped (SIGSTOP?) for 300 s, so it was killed")


def test_an_interpreter_stuck_in_c() -> None:
    seen = Watched()
    seen.beats = seen.moves = False
    found = seen.run(301)
    assert list(found) == [11, 301]
    said, killed = found.values()
    assert isinstance(said, Say) and "gave no sign of life (stuck in C code?) for 10 s" in said.text
    assert isinstance(killed, Kill) and killed.reason.startswith("gave no sign of life (stuck in C code?) for 300 s")


@pytest.mark.parametrize("cause", ["stopped", "silent"])
def test_one_without_a_replacement_is_killed_if_nothing_of_it_moves(cause: str) -> None:
    seen = Watched(replaceable=False)
    seen.stopped = cause == "stopped"
    seen.beats = seen.moves = False
    said, killed = seen.run(301).values()
    assert isinstance(said, Say) and said.text.endswith(
        "; it will be killed after 300 s (--hang-timeout), and the run ends with it"
    )
    assert isinstance(killed, Kill) and "for 300 s" in killed.reason


def test_one_without_a_replacement_may_take_its_time() -> None:
    seen = Watched(replaceable=False)
    seen.moves = False
    found = seen.run(10000)
    assert list(found) == [151], "said once, as it may be a long step"
    said = found[151]
    assert isinstance(said, Say) and said.text.endswith("; the run waits for it")
    seen.moves = True
    assert seen.step() == [Say("worker-1 goes on")]


def test_one_that_sigkill_does_not_end() -> None:
    seen = Watched(20.0)
    seen.moves = seen.beats = False
    assert [second for second, verdict in seen.run(21).items() if isinstance(verdict, Kill)] == [21]
    found = seen.run(1000)
    assert list(found) == [10]
    said = found[10]
    assert isinstance(said, Say) and said.text.startswith(
        "worker-1 was killed and does not end: it hangs in the kernel"
    )


def test_progress_is_a_sign_of_life_without_heartbeats() -> None:
    seen = Watched()
    seen.beats = False
    assert seen.run(400) == {}


def test_who_goes_on_is_said_to_and_starts_anew() -> None:
    seen = Watched()
    seen.stopped = True
    assert list(seen.run(290)) == [10]
    seen.stopped = False
    assert seen.step() == [Say("worker-1 goes on")]
    seen.stopped = True
    assert list(seen.run(299)) == [10], "the count starts anew"
    seen.stopped = False
    seen.beats = seen.moves = False
    assert seen.step() == [Say("worker-1 goes on")], "its heartbeat gets the time to come back"


def test_time_in_which_the_launcher_did_not_run_is_not_counted() -> None:
    seen = Watched()
    seen.beats = seen.moves = False
    seen.step()
    assert seen.step(100000.0) == []
    seen.beats = seen.moves = True
    assert seen.step(100000.0) == []
    seen.stopped = True
    assert seen.step(100000.0) == []


def test_a_replacement_that_does_not_become_ready() -> None:
    seen = Watched()
    seen.starting = True
    assert seen.run(301) == {300: Kill("was not ready for 300 s, so it was killed")}
    seen = Watched(5.0)
    seen.starting = True
    assert list(seen.run(61)) == [60], "a start may always take a minute"


@pytest.mark.parametrize("cause", ["moves", "beats", "stopped"])
def test_never(cause: str) -> None:
    seen = Watched(0.0)
    seen.moves = False
    if cause != "moves":
        seen.beats = False
    seen.stopped = cause == "stopped"
    found = seen.run(1000)
    assert not any(isinstance(verdict, Kill) for verdict in found.values())
    assert len(found) == (0 if cause == "moves" else 1)
    assert all("will be killed" not in verdict.text for verdict in found.values() if isinstance(verdict, Say))


def test_a_short_timeout() -> None:
    seen = Watched(4.0)
    seen.stopped = True
    assert list(seen.run(10)) == [2, 4]
    seen = Watched(4.0)
    seen.moves = False
    assert list(seen.run(10)) == [3, 5]


def test_processes_that_are_gone_are_forgotten() -> None:
    clock = Clock()
    watch = HangWatch(300.0, clock)
    for number in range(1000):  # each is seen once, stopped
        clock.now += LOOK_S
        assert watch.look({("worker-1", number): Sighting("worker-1", True, None)}) == []
    assert len(watch._watched) == 1
    assert not watch.is_due()
    clock.now += LOOK_S
    assert watch.is_due()


def test_is_stopped() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            assert not is_stopped(sleeper.pid)
            os.kill(sleeper.pid, signal.SIGSTOP)
            wait_until(lambda: is_stopped(sleeper.pid), 5.0)
        finally:
            sleeper.kill()
    assert not is_stopped(sleeper.pid)


# --- ends that take the kernel long


def started_pid(supervisor: Supervisor, incarnation: int = 1) -> int:
    proc = supervisor.start("worker-0", Device("cpu:0"), incarnation)
    assert isinstance(proc, UnreadyProc)
    return proc.pid


@pytest.mark.parametrize("command, code", [("sleep 60", -9), ("sh -c 'exit 3'", 3), ("true", 0)])
def test_an_end_that_the_kernel_has_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, code: int
) -> None:
    """It is taken as the end after a moment, and collected when it is one."""
    clock = Clock()
    folder = create_session(tmp_path, None, {"log_dir": None}, {})
    supervisor = Supervisor(folder, {**os.environ, CHILD_COMMAND_VARIABLE: command}, clock)
    pid = started_pid(supervisor)
    monkeypatch.setattr("launcher.supervisor._has_exited", lambda pid: False)
    real_poll = subprocess.Popen.poll
    monkeypatch.setattr(subprocess.Popen, "poll", lambda popen: None)
    if code == -9:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: exiting_code(pid) == code, 5.0)
    assert supervisor.reap() == [], "as a rule it is reported at once"
    clock.now += 0.2
    assert supervisor.reap() == []
    clock.now += 0.2
    (found,) = supervisor.reap()
    assert (found.role, found.pid, found.returncode, found.expected) == ("worker-0", pid, code, False)
    assert supervisor.reap() == []
    assert not supervisor.procs and not supervisor.all_gone
    os.kill(started_pid(supervisor, 2), signal.SIGKILL)
    monkeypatch.setattr(subprocess.Popen, "poll", real_poll)
    monkeypatch.setattr("launcher.supervisor._has_exited", _has_exited)
    wait_until(lambda: [each.incarnation for each in supervisor.reap()] == [2], 5.0)
    assert supervisor.all_gone
    assert exiting_code(pid) is None
    supervisor.close()
    folder.remove()


def test_core_files_are_without_shared_memory(tmp_path: Path) -> None:
    folder = create_session(tmp_path, None, {"log_dir": None}, {})
    supervisor = Supervisor(folder, {**os.environ, CHILD_COMMAND_VARIABLE: "sleep 60"})
    pid = started_pid(supervisor)
    assert int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16) == 0x31
    supervisor.signal_all(signal.SIGKILL)
    wait_until(lambda: supervisor.reap() or supervisor.all_gone, 5.0)
    supervisor.close()
    folder.remove()


# --- words


@pytest.mark.parametrize(
    "status, words",
    [
        (None, ""),
        (Status(), ""),
        (MOVING, "backward of layer 3, micro-batch 2 (slot 12)"),
        (Status(slot=12, finishing=11, phase="loss", microbatch=0), "loss, micro-batch 1 (slots 11, 12)"),
        (Status(finishing=11), "slot 11"),
        (Status(layer=4), "layer 4"),
        (Status(microbatch=4), "micro-batch 5"),
    ],
)
def test_words_for_a_place(status: Status | None, words: str) -> None:
    assert describe_place(status) == words
