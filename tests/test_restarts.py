"""A worker dies or hangs and is started again, with real processes and fake children; test_launcher_watch.py has the
decisions."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from launcher import rpctl
from rpruntime.process import start_time
from tests.launching import WAIT_READY, Run, plain_python, rplaunch
from tests.leaks import no_leaks, wait_until

NEWS = (
    WAIT_READY
    + """
import os, sys, time
from rpruntime.wire.messages import RoleDiedMsg, RoleReadyMsg
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + chr(10))  # whole, or not there
    sys.stdout.flush()
say("ready", sorted((role, info["incarnation"]) for role, info in session.ready.items()))
while not os.path.exists("end") and session.launcher_alive():
    for msg in session.post.receive(0.05):
        if isinstance(msg, RoleDiedMsg):
            say("died", time.monotonic(), msg.role, msg.incarnation, msg.pid, msg.restarts, msg.slots, msg.phase,
                msg.layer, msg.microbatch, "|", msg.reason)
        elif isinstance(msg, RoleReadyMsg):
            say("ready", msg.role, msg.incarnation, msg.info["incarnation"], msg.info["pid"])
say("end")
"""
)
"""Prints what the controller is told, until there is a file named "end"."""


class Session:
    """A run of `NEWS`."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder = folder
        self.run = run
        run.wait_for("ready [")

    def deaths(self) -> list[str]:
        """Lines about deaths so far, but for those before the script attached."""
        lines = self.run.out.splitlines()
        return [line for line in lines if line.startswith("died") and not line.endswith("died earlier")]

    def wait_deaths(self, count: int) -> list[str]:
        """The lines once there are so many."""
        wait_until(lambda: len(self.deaths()) == count, 15.0, f"{count} deaths: {self.run.out} {self.run.err}")
        return self.deaths()

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill a role's process; returns its pid."""
        pid = self.run.wait_children()[role]
        os.kill(pid, number)
        return pid

    def end(self) -> str:
        """Let the script end; returns what was said on stderr."""
        (self._folder / "end").touch()
        assert self.run.wait() == 0, self.run.err
        return self.run.err


@pytest.mark.parametrize("how", [rplaunch, pytest.param(plain_python, marks=pytest.mark.slow)])
def test_a_killed_worker_is_replaced(tmp_path: Path, how, capsys: pytest.CaptureFixture[str]) -> None:
    with no_leaks() as watch:
        session = Session(tmp_path, how(tmp_path, watch, NEWS))
        run = session.run
        assert "ready [('optimizer', 1), ('worker-0', 1), ('worker-1', 1)]" in run.out
        began = time.monotonic()
        pid = session.kill("worker-1")
        words, reason = session.wait_deaths(1)[0].split(" | ")
        _, when, *rest = words.split(maxsplit=2)
        assert float(when) - began < 1.0
        assert rest == [f"worker-1 1 {pid} True (11, 12) backward 3 1"]
        assert reason.startswith("killed by signal 9 (SIGKILL)")
        run.wait_for("ready worker-1 2 2 ")
        row = run.session()["roles"]["worker-1"]
        assert (row["state"], row["incarnation"]) == ("ready", 2)
        assert f"ready worker-1 2 2 {row['pid']}\n" in run.out
        assert not list(run.folder.glob("worker-1.1.*")), "nothing of the dead one's but its log"
        assert {path.name for path in run.folder.glob("*.status")} == {"worker-0.1.status", "worker-1.2.status"}
        assert rpctl.main(["status", run.folder.name]) == 0
        assert re.search(r"worker-1 +cpu:1 +pid \d+ +ready \(process 2\)$", capsys.readouterr().out, re.MULTILINE)

        pid = session.kill("worker-1", signal.SIGSEGV)
        assert f" worker-1 2 {pid} True " in session.wait_deaths(2)[1]
        run.wait_for("ready worker-1 3 3 ")
        lines = [line for line in session.end().splitlines() if line.startswith("rpruntime: ")]
        assert len(lines) == 3
        assert re.fullmatch(
            r"rpruntime: worker-1 on cpu:1 \(pid \d+\) died: killed by signal 9 \(SIGKILL\), .*, in backward of layer "
            r"3, micro-batch 2 \(slots 11, 12\); a replacement is starting \(restart 1 of 2 in ten minutes\)",
            lines[0],
        )
        assert "SIGSEGV" in lines[1] and "(restart 2 of 2 in ten minutes)" in lines[1]
        assert lines[2] == "rpruntime: worker-1 was restarted 2 times"


def test_a_device_that_dies_too_often_is_retired(tmp_path: Path) -> None:
    """Once in work, twice at its start: a replacement that does not start is a death too."""
    with no_leaks() as watch:
        failing = {"FAKE_EXIT_EARLY": "worker-0.2=3", "FAKE_START_FAILED": "worker-0.3=no such GPU"}
        session = Session(tmp_path, rplaunch(tmp_path, watch, NEWS, **failing))
        session.kill("worker-0")
        deaths = session.wait_deaths(3)
        assert [line.split()[3] for line in deaths] == ["1", "2", "3"]
        assert [line.split()[5] for line in deaths] == ["True", "True", "False"]
        assert deaths[1].endswith("| exit code 3: something printed before the end")
        assert deaths[2].endswith(" ()  -1 -1 | no such GPU")
        row = session.run.session()["roles"]["worker-0"]
        assert (row["state"], row["reason"], row["incarnation"]) == ("retired", "no such GPU", 3)
        assert session.run.session()["roles"]["worker-1"]["state"] == "ready"
        lines = session.end().splitlines()
        assert "did not start: no such GPU; cpu:0 is retired (--max-restarts), the run goes on without it" in lines[-3]
        assert lines[-2] == "rpruntime: worker-0 was restarted 2 times"
        assert re.fullmatch(r"rpruntime: worker-0 on cpu:0 \(pid \d+\) was retired: no such GPU; log .*", lines[-1])


def test_who_attaches_later_hears_of_retired_devices_and_incarnations(tmp_path: Path) -> None:
    script = NEWS.replace(
        WAIT_READY, "import time, os\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n" + WAIT_READY
    )
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, flags=("--max-restarts=1",))
        os.kill(run.wait_children()["worker-0"], signal.SIGKILL)
        wait_until(lambda: run.session()["roles"]["worker-0"]["incarnation"] == 2, 5.0)
        run.wait_children()
        (tmp_path / "go").touch()
        session = Session(tmp_path, run)
        assert "ready [('optimizer', 1), ('worker-0', 2), ('worker-1', 1)]" in run.out
        session.kill("worker-0")
        assert " worker-0 2 " in session.wait_deaths(1)[0]
        assert "no device is left" not in session.end()


def test_a_dead_optimizer_is_not_replaced(tmp_path: Path) -> None:
    with no_leaks() as watch:
        session = Session(tmp_path, rplaunch(tmp_path, watch, NEWS))
        pid = session.kill("optimizer", signal.SIGABRT)
        assert re.search(rf" optimizer 1 {pid} False \(\)  -1 -1 \| killed by signal 6", session.wait_deaths(1)[0])
        lines = session.end().splitlines()
        assert "SIGABRT); its update may be half done, so the run ends" in lines[-2]
        assert "ended early" in lines[-1]


@pytest.mark.parametrize(
    "hang, seconds, words",
    [
        pytest.param("stop", 2, "was stopped (SIGSTOP?) for ", marks=pytest.mark.slow),  # quick in test_deaths.py
        ("busy", 2, "made no progress for "),
        pytest.param("silent", 2, "gave no sign of life (stuck in C code?) for ", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_hangs_is_said_killed_and_replaced(tmp_path: Path, hang: str, seconds: int, words: str) -> None:
    with no_leaks() as watch:
        environ = {} if hang == "stop" else {"FAKE_HANG": f"worker-0.1={hang}"}
        run = rplaunch(tmp_path, watch, NEWS, flags=(f"--hang-timeout={seconds}",), **environ)
        session = Session(tmp_path, run)
        if hang == "stop":
            session.kill("worker-0", signal.SIGSTOP)
        died = session.wait_deaths(1)[0]
        assert re.search(r" worker-0 1 \d+ True \(11, 12\) backward 3 1 \| ", died)
        assert f"| {words}{seconds} s" in died or f"| {words}{seconds + 1} s" in died
        assert "(it was in backward of layer 3, micro-batch 2 (slots 11, 12))" in died
        run.wait_for("ready worker-0 2 2 ")
        first, second, *_ = [line for line in session.end().splitlines() if line.startswith("rpruntime: ")]
        assert words in first and f"it will be killed after {seconds} s (--hang-timeout)" in first
        assert f"died: {words}" in second


@pytest.mark.parametrize(
    "hang, words",
    [
        ("stop", "was stopped (SIGSTOP?) for "),
        pytest.param("silent", "gave no sign of life (stuck in C code?) for ", marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_that_hangs_is_said_and_ends_the_run(tmp_path: Path, hang: str, words: str) -> None:
    with no_leaks() as watch:
        environ = {} if hang == "stop" else {"FAKE_HANG": f"optimizer={hang}"}
        session = Session(tmp_path, rplaunch(tmp_path, watch, NEWS, flags=("--hang-timeout=2",), **environ))
        if hang == "stop":
            session.kill("optimizer", signal.SIGSTOP)
        assert re.search(rf" optimizer 1 \d+ False .* \| {re.escape(words)}[23] s", session.wait_deaths(1)[0])
        first, second, *_ = [line for line in session.end().splitlines() if line.startswith("rpruntime: ")]
        assert words in first and first.endswith("killed after 2 s (--hang-timeout), and the run ends with it")
        assert f"died: {words}" in second and "so the run ends" in second


def test_an_optimizer_that_is_long_at_one_thing_is_said(tmp_path: Path) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, NEWS, flags=("--hang-timeout=2",), FAKE_HANG="optimizer=busy")
        session = Session(tmp_path, run)
        wait_until(lambda: "made no progress" in run.err, 10.0)
        os.kill(run.wait_children()["worker-0"], signal.SIGSTOP)  # it is killed after as long
        session.wait_deaths(1)
        lines = [line for line in session.end().splitlines() if "optimizer" in line and line.startswith("rpruntime: ")]
        assert len(lines) == 1 and lines[0].endswith("; the run waits for it")


@pytest.mark.slow
def test_who_is_continued_in_time_goes_on(tmp_path: Path) -> None:
    with no_leaks() as watch:
        session = Session(tmp_path, rplaunch(tmp_path, watch, NEWS, flags=("--hang-timeout=20",)))
        pid = session.kill("worker-0", signal.SIGSTOP)
        wait_until(lambda: "was stopped" in session.run.err, 15.0)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: f"worker-0 on cpu:0 (pid {pid}) goes on" in session.run.err, 5.0)
        assert session.run.wait_children()["worker-0"] == pid
        session.end()
        assert not session.deaths()


@pytest.mark.parametrize("end", [pytest.param("script", marks=pytest.mark.slow), "launcher"])
def test_replacements_end_with_the_session(tmp_path: Path, end: str) -> None:
    """One that is ready, and one that is starting."""
    with no_leaks(sockets=end == "script") as watch:
        session = Session(tmp_path, rplaunch(tmp_path, watch, NEWS, FAKE_NEVER_READY="worker-1.2=1"))
        session.kill("worker-0")
        session.run.wait_for("ready worker-0 2 2 ")
        session.kill("worker-1")
        wait_until(lambda: session.run.session()["roles"]["worker-1"]["incarnation"] == 2, 5.0)
        rows = session.run.session()["roles"]
        assert (rows["worker-0"]["state"], rows["worker-1"]["state"]) == ("ready", "starting")
        os.kill(session.run.script_pid() if end == "script" else session.run.popen.pid, signal.SIGKILL)
        wait_until(lambda: all(start_time(row["pid"]) is None for row in rows.values()), 5.0, "all end")
        assert session.run.wait() == 137


@pytest.mark.slow
def test_waiting_for_a_replacement_is_said(tmp_path: Path) -> None:
    with no_leaks() as watch:
        session = Session(tmp_path, rplaunch(tmp_path, watch, NEWS, FAKE_NEVER_READY="worker-1.2=1"))
        session.kill("worker-1")
        wait_until(lambda: "waiting for the replacement of worker-1 to start (10 s)" in session.run.err, 20.0)
        session.end()
