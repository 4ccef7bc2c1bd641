"""Ctrl-C, SIGTERM and processes that die, with real processes and fake children."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

import launcher.rplaunch
from tests.launching import LAUNCH, WAIT_READY, Run, plain_python, rplaunch, small_cgroup
from tests.leaks import no_leaks, wait_until

SAVES = f"""
try:
    import time
    print("started", flush=True)
{"".join("    " + line for line in WAIT_READY.splitlines(keepends=True))}
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print("handler", flush=True)
    end = time.monotonic() + 1.3
    while time.monotonic() < end:
        time.sleep(0.01)
    print("saved", flush=True)
    raise
"""


def _catches_interrupts(pid: int, by: signal.Signals = signal.SIGINT) -> bool:
    """Whether a process has a handler for a signal; Python itself has one for SIGINT, long before it runs a module."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return bool(int(mask, 16) >> (by - 1) & 1)


def _interrupt(run: Run, times: int) -> None:
    """So many interrupts within a second, as from a keyboard."""
    for count in range(times):
        if count:
            time.sleep(0.2)
        run.kill_group(signal.SIGINT)


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("moment", ["first line", pytest.param("started", marks=pytest.mark.slow), "ready"])
def test_interrupt_is_one_keyboard_interrupt(tmp_path: Path, moment: str, times: int) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, SAVES)
        if moment == "first line":
            assert run.folder
        else:
            run.wait_for(moment)
        _interrupt(run, times)
        assert run.wait() == 130, run.err
        if moment != "first line" or run.out:
            assert run.out.count("handler") == 1, run.out + run.err
            assert run.out.count("saved") == 1
        assert "Exception ignored" not in run.err
        assert "rplaunch.py" not in run.err
        assert "run_script.py" not in run.err


def test_an_interrupt_before_the_imports_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str], early: list[float]) -> int:
        signal.raise_signal(signal.SIGINT)
        return len(early)

    monkeypatch.setattr("launcher.rplaunch._main", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert launcher.rplaunch.main(["train.py"]) == 1
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("delay", [0.05, 0.08, 0.12, 0.16, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0])
def test_interrupt_at_any_moment(tmp_path: Path, delay: float, times: int) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, SAVES)
        time.sleep(delay)
        # An interrupt while Python itself starts (before our first line of code) is Python's own.
        caught = signal.SIGCHLD
        wait_until(lambda: _catches_interrupts(run.popen.pid, caught) or run.popen.poll() is not None, 5.0)
        _interrupt(run, times)
        assert run.wait() == 130, run.err
        assert run.out.count("handler") <= 1
        assert run.out.count("saved") == run.out.count("handler")


def test_interrupt_of_rplaunch_alone_reaches_the_script(tmp_path: Path) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, SAVES)
        run.wait_for("ready")
        run.popen.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.out.count("handler") == 1
        assert "saved" in run.out


def test_later_interrupt_ends_everything(tmp_path: Path) -> None:
    script = (
        WAIT_READY
        + """
import time
print("ready", flush=True)
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("refused", flush=True)
"""
    )
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, FAKE_STUBBORN="term")
        run.wait_for("ready")
        run.kill_group(signal.SIGINT)
        run.wait_for("refused")
        time.sleep(2.1)  # the window in which interrupts count as one
        began = time.monotonic()
        run.kill_group(signal.SIGINT)
        assert run.wait() == 130
        assert time.monotonic() - began < 2.0
        assert "ending everything" in run.err


def test_terminate_runs_the_scripts_handler_with_children_alive(tmp_path: Path) -> None:
    script = (
        WAIT_READY
        + """
import os, signal, sys, time
pids = [info["pid"] for info in session.ready.values()]
def save(number, frame):
    for pid in pids:
        os.kill(pid, 0)
    session.segments.create(4096)
    print("saved with", len(pids), "children", flush=True)
    sys.exit(9)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    )
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script)
        run.wait_for("ready")
        run.popen.terminate()
        assert run.wait() == 9, run.err
        assert "saved with 3 children" in run.out


def test_terminate_is_forced_after_the_grace(tmp_path: Path) -> None:
    script = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("on", flush=True)
time.sleep(60)
"""
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, flags=("--shutdown-timeout=0.5",))
        run.wait_for("on")
        began = time.monotonic()
        run.popen.terminate()
        assert run.wait() == 143
        assert 0.4 < time.monotonic() - began < 3.0
        assert "did not end within 0.5 s" in run.err


def test_other_signals_are_passed_on(tmp_path: Path) -> None:
    script = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
signal.signal(signal.SIGHUP, lambda *_: sys.exit(6))
print("on", flush=True)
while True:
    time.sleep(0.01)
"""
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script)
        run.wait_for("on")
        run.popen.send_signal(signal.SIGUSR1)
        run.wait_for("usr1")
        run.popen.send_signal(signal.SIGHUP)
        assert run.wait() == 6


WAITS_FOR_A_DEATH = (
    WAIT_READY
    + """
from rpruntime.wire.messages import RoleDiedMsg
print("ready", flush=True)
died = []
while not died:
    died = [msg for msg in session.post.receive(0.5) if isinstance(msg, RoleDiedMsg)]
print(died[0].role, died[0].pid, died[0].reason, flush=True)
"""
)


@pytest.mark.parametrize(
    "number, words",
    [
        pytest.param(
            signal.SIGKILL, "killed by signal 9 (SIGKILL)", marks=pytest.mark.slow
        ),  # quick in test_restarts.py
        (signal.SIGBUS, "/dev/shm has"),
        pytest.param(signal.SIGSEGV, "killed by signal 11 (SIGSEGV)", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("how", [rplaunch, pytest.param(plain_python, marks=pytest.mark.slow)])
def test_child_dies(tmp_path: Path, number: signal.Signals, words: str, how) -> None:
    with no_leaks() as watch:
        run = how(tmp_path, watch, WAITS_FOR_A_DEATH)
        run.wait_for("ready")
        pid = run.wait_children()["worker-1"]
        os.kill(pid, number)
        assert run.wait() == 0, run.err
        assert f"worker-1 {pid} killed by signal {number.value} ({number.name})" in run.out
        assert words in run.out
        said = next(line for line in run.err.splitlines() if " died: " in line)
        reason = run.out.splitlines()[-1].partition(f" {pid} ")[2]
        assert said.startswith(f"rpruntime: worker-1 on cpu:1 (pid {pid}) died: {reason}")
        assert words in said


def test_out_of_memory_is_named(tmp_path: Path) -> None:
    with no_leaks() as watch, small_cgroup(f"rpruntime-test-{os.getpid()}", 160 << 20) as cgroup:
        (tmp_path / "train.py").write_text("import time\ntime.sleep(60)")
        # while the eater is being taken apart, the kernel must not pick another one
        spare = "echo -1000 > /proc/self/oom_score_adj 2>/dev/null"
        join = f'{spare}; echo $$ > {cgroup}/cgroup.procs; exec "$@"'
        run = Run(tmp_path, watch, ["sh", "-c", join, "sh", *LAUNCH, "train.py"], FAKE_EAT="worker-0.1=yes")
        wait_until(lambda: " died: " in run.err, 40.0, "it has eaten too much")
        run.popen.terminate()
        run.wait()
        said = next(line for line in run.err.splitlines() if " died: " in line)
        assert "worker-0 on cpu:0" in said
        assert "out of host memory: killed by signal 9 (SIGKILL) by the kernel" in said
        assert "the cgroup's limit is 160 MiB" in said


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"FAKE_START_FAILED": "worker-0=no such GPU"}, ["worker-0 on cpu:0", "did not start: no such GPU"]),
        (
            {"FAKE_EXIT_EARLY": "optimizer=3"},
            ["optimizer (pid", "did not start: exit code 3", "something printed before the end"],
        ),
    ],
)
def test_child_that_does_not_start(tmp_path: Path, environ: dict[str, str], words: list[str]) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, WAIT_READY, **environ)
        assert run.wait() == 1
        assert "WorkerDied" in run.err
        for word in words:
            assert word in run.err
        assert words[1].removeprefix("did not start: ") in run.err.splitlines()[-1]


def test_child_that_is_killed_at_its_start_is_replaced(tmp_path: Path) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, WAIT_READY, FAKE_KILL_EARLY="worker-1=11")
        assert run.wait() == 0
        assert "worker-1 on cpu:1" in run.err
        assert "did not start: killed by signal 11 (SIGSEGV)" in run.err
        assert "a replacement is starting" in run.err


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({"FAKE_STUBBORN": "ask"}, marks=pytest.mark.slow),
        {"FAKE_STUBBORN": "term"},
        {"FAKE_NEVER_READY": "worker-0=1"},
    ],
)
def test_children_end_within_five_seconds(tmp_path: Path, environ: dict[str, str]) -> None:
    script = WAIT_READY if "FAKE_STUBBORN" in environ else ""
    with no_leaks(within_s=1.0) as watch:
        run = rplaunch(tmp_path, watch, script + "\nprint('end', flush=True)", **environ)
        run.wait_for("end")
        began = time.monotonic()
        assert run.wait() == 0
        assert time.monotonic() - began < 5.0


def test_waiting_is_said(tmp_path: Path) -> None:
    script = """
import rpruntime.session as s
session = s.current()
waited = []
class Enough(Exception): pass
def progress(roles, seconds):
    if seconds > 2.4:
        raise Enough
try:
    session.wait_ready(progress)
except Enough:
    print("enough")
"""
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, FAKE_NEVER_READY="worker-1=1")
        assert run.wait() == 0, run.err
        assert run.out == "enough\n"
        assert "waiting for worker-1 to start (2 s)" in run.err


def test_tee(tmp_path: Path) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, WAIT_READY, flags=("-t", "workers"))
        assert run.wait() == 0
        assert "[worker-0] " in run.err
        assert "asked to end: the session ends" in run.err
        assert "[optimizer]" not in run.err


@pytest.mark.slow
def test_interrupts_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(0)
    for count in range(15):
        with no_leaks() as watch:
            run = rplaunch(tmp_path / str(count), watch, SAVES)
            # at an interrupt before that, Python ends by itself
            wait_until(lambda: _catches_interrupts(run.popen.pid, signal.SIGCHLD), 5.0)  # noqa: B023
            time.sleep(rng.random())
            _interrupt(run, rng.choice([1, 2, 5]))
            assert run.wait() == 130, run.err
            assert run.out.count("saved") == run.out.count("handler") <= 1
