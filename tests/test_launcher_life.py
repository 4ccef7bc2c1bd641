"""Nothing of ours outlives a run, and runs do not disturb each other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rpruntime.process import start_time
from tests.launching import LAUNCH, ROOT, WAIT_READY, Run, plain_python, rplaunch
from tests.leaks import no_leaks, processes_with, wait_until

STAYS = (
    WAIT_READY
    + """
import os, time
segment, memory = session.segments.create(1 << 20)
memory[:4] = b"abcd"
print("ready", flush=True)
def loader(parent):
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)
parent = os.getpid()
for _ in range(4):
    if os.fork() == 0:
        loader(parent)
print("loaders", flush=True)
while session.launcher_alive():
    time.sleep(0.02)
from rpruntime.errors import SessionLost
try:
    session.segments.create(4096)
except SessionLost as err:
    print("lost:", err, bytes(memory[:4]), flush=True)
"""
)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", [pytest.param(rplaunch, marks=pytest.mark.slow), plain_python])
def test_launcher_is_killed(tmp_path: Path, how) -> None:
    """Children end, the script gets SessionLost and keeps its memory."""
    with no_leaks(sockets=False) as watch:
        run = how(tmp_path, watch, STAYS, FAKE_SEGMENT="1000000")
        run.wait_for("loaders")
        children = run.wait_children()
        _kill(run.session()["launcher"]["pid"])
        wait_until(lambda: all(start_time(pid) is None for pid in children.values()), 5.0, "children end")
        run.wait_for("lost: the launcher of session", 5.0)
        assert "b'abcd'" in run.out
        folder = run.folder
    # What it left goes at the next start; the logs stay.
    assert list(folder.glob("*.sock"))
    with no_leaks() as watch:
        other = rplaunch(tmp_path, watch, "")
        assert other.wait() == 0
    assert {path.suffix for path in folder.iterdir()} == {".log"}


@pytest.mark.parametrize("how", [pytest.param(rplaunch, marks=pytest.mark.slow), plain_python])
def test_script_is_killed(tmp_path: Path, how) -> None:
    with no_leaks() as watch:
        run = how(tmp_path, watch, STAYS)
        run.wait_for("loaders")
        run.wait_children()
        _kill(run.script_pid())
        assert run.wait() == 137


def test_optimizer_is_killed_and_the_script_decides(tmp_path: Path) -> None:
    """Its process has no replacement, and the session lives until the script ends."""
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, STAYS + "\n", FAKE_SEGMENT="1000")
        run.wait_for("loaders")
        _kill(run.wait_children()["optimizer"])
        wait_until(lambda: run.session()["roles"]["optimizer"]["state"] == "ended", 5.0, "its end is noted")
        assert "SIGKILL" in run.session()["roles"]["optimizer"]["reason"]
        assert run.popen.poll() is None
        _kill(run.script_pid())
        assert run.wait() == 137
        assert "optimizer " in run.err.splitlines()[-1]
        assert "ended early" in run.err.splitlines()[-1]


@pytest.mark.parametrize("how", [pytest.param(rplaunch, marks=pytest.mark.slow), plain_python])
def test_everybody_is_killed_at_once(tmp_path: Path, how) -> None:
    with no_leaks(sockets=False) as watch:
        run = how(tmp_path, watch, STAYS, FAKE_SEGMENT="1000000")
        run.wait_for("loaders")
        run.wait_children()
        for pid in processes_with(*next(iter(watch.environ.items()))):
            _kill(pid)
        assert run.wait() == 137


def test_stopped_children_end_too(tmp_path: Path) -> None:
    with no_leaks(sockets=False) as watch:
        run = rplaunch(tmp_path, watch, STAYS)
        run.wait_for("loaders")
        for pid in run.wait_children().values():
            os.kill(pid, signal.SIGSTOP)
        _kill(run.popen.pid)
        run.wait_for("lost:", 5.0)


def test_process_of_the_script_is_not_ours(tmp_path: Path) -> None:
    script = WAIT_READY + "import subprocess\nprint(subprocess.Popen(['sleep', '61.5']).pid, flush=True)"
    with no_leaks(allow=("sleep 61.5",)) as watch:
        run = rplaunch(tmp_path, watch, script)
        assert run.wait() == 0
        sleeper = int(run.out)
        assert Path(f"/proc/{sleeper}/comm").read_text() == "sleep\n"
        _kill(sleeper)


def test_children_inherit_no_descriptor_of_others(tmp_path: Path) -> None:
    script = (
        WAIT_READY
        + """
import os
for info in session.ready.values():
    for fd in os.listdir(f"/proc/{info['pid']}/fd"):
        target = os.readlink(f"/proc/{info['pid']}/fd/{fd}")
        if int(fd) > 2 and ("pipe" in target or "rpruntime-" in target):
            print(target)
"""
    )
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script)
        assert run.wait() == 0, run.err
        pipes = [line for line in run.out.splitlines() if line.startswith("pipe")]
        assert len(set(pipes)) == 1, "the death pipe and nothing else"
        assert len(pipes) == 3


def test_two_runs_in_the_same_second(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with no_leaks(sockets=False) as watch:
        first = rplaunch(tmp_path / "a", watch, STAYS)
        second = rplaunch(tmp_path / "b", watch, STAYS)
        first.wait_for("loaders")
        second.wait_for("loaders")
        assert first.folder != second.folder
        second.wait_children()
        sockets = set(second.folder.glob("*.sock"))
        for pid in [first.popen.pid, first.script_pid(), *first.wait_children().values()]:
            _kill(pid)
        assert first.wait() == 137
        assert set(second.folder.glob("*.sock")) == sockets
        third = rplaunch(tmp_path / "a", watch, WAIT_READY)  # cleans after the first, not the second
        assert third.wait() == 0
        assert set(second.folder.glob("*.sock")) == sockets
        _kill(second.popen.pid)
        second.wait_for("b'abcd'")


@pytest.mark.skipif(os.getuid() != 0, reason="needs a mount namespace and another uid")
def test_file_of_another_user_in_place(tmp_path: Path) -> None:
    blocked = "touch /tmp/rpruntime-0 && chown 12345 /tmp/rpruntime-0"
    prepare = f'mount -t tmpfs tmpfs /tmp && {blocked} && exec "$@"'
    script = ROOT / "tests" / "fakes" / "use_session.py"
    with no_leaks() as watch:
        run = Run(tmp_path, watch, ["unshare", "-m", "sh", "-c", prepare, "sh", *LAUNCH, str(script)])
        code = run.wait()
        if "ot permitted" in run.err:
            pytest.skip("no mount namespace here")
        assert code == 0, run.err
        assert run.out == "fine\n"
        assert "belongs to uid 12345, not to you (uid 0); using /tmp/rpruntime-0.1" in run.err


@pytest.mark.parametrize(
    "kind", ["long", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("space", "missing")), "not writable"]
)
def test_temporary_folder_does_not_matter(tmp_path: Path, kind: str) -> None:
    folder = {
        "long": tmp_path / ("x" * 150),
        "space": tmp_path / "a b",
        "missing": tmp_path / "none",
        "not writable": Path("/proc"),
    }[kind]
    if kind in ("long", "space"):
        folder.mkdir()
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, WAIT_READY + "print('fine')", TMPDIR=str(folder))
        assert run.wait() == 0, run.err
        assert run.out == "fine\n"
        assert not list(run.folder.glob("*.sock"))
        assert not folder.exists() or kind == "not writable" or not list(folder.iterdir())


def test_two_controllers(tmp_path: Path) -> None:
    script = (
        WAIT_READY
        + """
import subprocess, sys
code = "import rpruntime.session as s; s.current()"
done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
print(done.stderr.splitlines()[-1])
session.segments.create(100)
"""
    )
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script)
        assert run.wait() == 0, run.err
        assert re.search(r"ConfigError: session \S+ is used by process \d+ \(.+\)", run.out), run.out


@pytest.mark.skipif(os.getuid() != 0, reason="needs a mount namespace")
@pytest.mark.slow
def test_kill_at_twenty_moments(tmp_path: Path) -> None:
    """M2: SIGKILL to all processes of a run at once, start-up included; a live run is unharmed."""
    prepare = 'mount -t tmpfs -o size=512m tmpfs /dev/shm && exec "$@"'
    driver = ROOT / "tests" / "fakes" / "kill_moments.py"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", prepare, "sh", sys.executable, str(driver), str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=110, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if "ot permitted" in done.stderr:
        pytest.skip("no mount namespace here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "20 moments, the live run is unharmed"
