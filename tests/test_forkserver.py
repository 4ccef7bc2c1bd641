"""The fork server: whose children the processes are, and what follows from its end at every moment."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from launcher.children import Ended, Proc, RequestedProc, UnreadyProc
from launcher.devices import Device
from launcher.forkserver import Forked
from launcher.procstat import children_named
from launcher.session import create_session
from launcher.supervisor import Supervisor
from rpruntime import forkserver
from rpruntime.forkserver import PROCESS_NAME, SOCKET_VARIABLE, why_unfit
from rpruntime.process import EXIT_UNFIT
from tests.launching import ROOT, WAIT_READY, Run, rplaunch
from tests.leaks import no_leaks, wait_until

SAYS_READY = f"""
import os, socket, time
s = socket.socket(fileno=int(os.environ[{SOCKET_VARIABLE!r}]))
s.send(b'{{"ready": true}}')
"""
STAYS = WAIT_READY + "import time\nwhile True:\n    time.sleep(0.1)\n"


# --- decisions, with something else in the server's place


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Roles are `sleep`; the fork server is the Python code in the variable SERVER."""

    def command(*words: str) -> list[str]:
        if "rpruntime.forkserver" in words:
            return [sys.executable, "-c", os.environ["SERVER"]]
        return ["sleep", "60"]

    monkeypatch.setattr("launcher.supervisor.python_command", command)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RPRUNTIME_")}
    folder = create_session(tmp_path, None, {"log_dir": None}, {})
    found = Supervisor(folder, environ)
    yield found
    found.stop()
    found.signal_all(signal.SIGKILL)
    wait_until(lambda: not found.reap() and found.all_gone, 5.0)
    found.close()
    folder.remove()


def started(supervisor: Supervisor, role: str = "worker-0") -> Proc:
    return supervisor.start(role, Device(f"cpu:{role[-1]}") if role != "optimizer" else None)


def ends(supervisor: Supervisor, count: int) -> list[Ended]:
    found: list[Ended] = []
    wait_until(lambda: found.extend(supervisor.reap()) or len(found) >= count, 10.0)
    return found


def test_who_has_a_context_or_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(forkserver, "_threads_after_a_fork", lambda: 1)
    assert why_unfit() == ""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert why_unfit() == "an import has opened a GPU"
    for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd"):
        with monkeypatch.context() as patch:
            patch.setattr(forkserver, "_open_files", lambda path=path: iter(["pipe:[1]", path]))
            assert why_unfit() == "an import has opened a GPU"
    with Path("/dev/null").open() as file:
        assert "/dev/null" in forkserver._open_files()
        assert file.fileno()
    with monkeypatch.context() as patch:
        patch.setattr(forkserver, "_threads_after_a_fork", lambda: 2)
        assert why_unfit() == "an import has started threads"
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert why_unfit() == "an import has started threads"


def test_a_server_that_does_not_come_to_be_is_the_end_of_all(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER", "raise ImportError('torch is broken')")
    for role in ("optimizer", "worker-0"):
        assert isinstance(started(supervisor, role), RequestedProc)
    assert supervisor.unready(replacements=False) == ["optimizer", "worker-0"]
    for ended in ends(supervisor, 2):
        assert (ended.returncode, ended.was_ready, ended.expected) == (1, False, False)
        assert ended.pid is None and "pid" not in ended.who, "there was no process"
        assert ended.lines[-1] == "ImportError: torch is broken"
        assert "torch is broken" in ended.log_file.read_text() and ended.log_file.stem == ended.role
    assert supervisor.all_gone


@pytest.mark.parametrize("server", [f"raise SystemExit({EXIT_UNFIT})", SAYS_READY, SAYS_READY + "s.recv(1)"])
def test_without_a_server_that_is_of_use_processes_are_started(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    """It is unfit; it has died after its imports; it has died with a request in its hands."""
    monkeypatch.setenv("SERVER", server)
    assert isinstance(started(supervisor), RequestedProc)
    wait_until(lambda: not supervisor.reap() and isinstance(supervisor.procs["worker-0"], UnreadyProc), 10.0)
    assert supervisor.take_started() and not supervisor.take_started()
    assert isinstance(started(supervisor, "worker-1"), UnreadyProc), "nor is there another server"


DIES_IN_A_FORK = f"""
import os, signal, socket, time
from rpruntime import forkserver
from rpruntime.process import PR_SET_NAME, prctl
prctl(PR_SET_NAME, forkserver.PROCESS_NAME.encode())
server, real_exit = os.getpid(), os._exit

def dies(*_):
    os.kill(server, signal.SIGKILL)

def exits_after_the_server(code):
    while os.getppid() == server:
        time.sleep(0.01)
    real_exit(code)

MOMENT
s = socket.socket(fileno=int(os.environ[{SOCKET_VARIABLE!r}]))
s.send(b'{{"ready": true}}')
socket.recv_fds(s, 9999, 1)
forkserver._fork(s, "worker-0")
"""


@pytest.mark.parametrize(
    "moment",
    [
        "os.waitpid = dies",  # the process between may not have ended yet, or not be collected
        "os.waitpid, os._exit = dies, exits_after_the_server",  # it has not ended
        "forkserver._send = dies",  # it is collected, and we are not told of the new one
    ],
)
def test_what_a_dying_server_was_forking_is_collected(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setenv("SERVER", DIES_IN_A_FORK.replace("MOMENT", moment))
    assert isinstance(started(supervisor), RequestedProc)
    wait_until(lambda: not supervisor.reap() and isinstance(supervisor.procs["worker-0"], UnreadyProc), 10.0)
    wait_until(lambda: not supervisor.reap() and not children_named(PROCESS_NAME), 5.0)
    assert not supervisor.reap() and not _is_subreaper(), "nobody else's children become ours"
    assert isinstance(supervisor.procs["worker-0"], UnreadyProc), "the one that was started instead"


def _is_subreaper() -> bool:
    value = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(37, ctypes.byref(value), 0, 0, 0) == 0  # PR_GET_CHILD_SUBREAPER
    return bool(value.value)


def test_a_fork_that_fails_is_the_end_of_that_process(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"role": "worker-0", "error": "no process can be forked"})
    monkeypatch.setenv("SERVER", SAYS_READY + f"s.recv(9999); s.send({answer!r}.encode()); s.recv(1); s.recv(1)")
    started(supervisor)
    (ended,) = ends(supervisor, 1)
    assert (ended.reason, ended.returncode, ended.role) == ("no process can be forked", 1, "worker-0")
    assert ended.pid is None


def test_a_server_that_does_not_answer_is_killed_in_its_childs_place(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER", SAYS_READY + "time.sleep(60)")
    started(supervisor)
    (sighting,) = supervisor.sightings().values()
    assert sighting.who == "worker-0 on cpu:0" and not sighting.stopped
    supervisor.kill("worker-0", "was not ready")
    (ended,) = ends(supervisor, 1)
    assert (ended.reason, ended.returncode, ended.pid) == ("was not ready", -signal.SIGKILL, None)


def test_what_is_forked_while_the_session_ends_is_killed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER", "import time; time.sleep(60)")
    started(supervisor)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    answers = [[Forked("worker-0", child.pid)]]
    server = supervisor._server
    assert server is not None
    monkeypatch.setattr(server, "answers", lambda: answers.pop() if answers else [])
    supervisor.stop()
    ended: list[Ended] = []
    wait_until(lambda: bool(ended.extend(supervisor.reap()) or ended), 5.0, "its end")
    assert [(found.role, found.returncode) for found in ended] == [("worker-0", -signal.SIGKILL)]
    child.wait()


def test_a_session_that_ends_waits_for_no_import(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER", "import time; time.sleep(60)")
    started(supervisor)
    supervisor.stop()
    (ended,) = ends(supervisor, 1)
    assert ended.expected and supervisor.all_gone


# --- real ones


def _line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()


def _children(pid: int) -> dict[str, int]:
    """Names of a process's children; a zombie would be among them."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
    return found


def _next(run: Run, role: str, incarnation: int) -> int:
    def row() -> dict:
        return run.session()["roles"].get(role, {})

    wait_until(lambda: (row().get("incarnation"), row().get("state")) == (incarnation, "ready"), 40.0, run.err)
    return int(row()["pid"])


def test_processes_are_forked_as_children_of_the_launcher(tmp_path: Path) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, STAYS, RPRUNTIME_CHILD_COMMAND="")
        wait_until(lambda: run.session()["roles"], 10.0)
        rows = run.session()["roles"]
        assert {(row["state"], row["pid"]) for row in rows.values()} == {("starting", None)}
        pids = {role: _next(run, role, 1) for role in rows}
        launcher = run.popen.pid
        children = _children(launcher)
        assert {name: children[f"rp:{name}"] for name in pids} == pids
        assert len(children) == 5, "and the server and the script"
        server = children["rp:forkserver"]
        assert len(os.listdir(f"/proc/{server}/task")) == 1 and not _children(server)
        for role, pid in pids.items():
            assert _line(pid).startswith(f"rpruntime.{role.split('-')[0]} {role} {run.folder.name[:4]}")
            assert os.getsid(pid) == pid
            assert int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16) == 0x31
            assert os.readlink(f"/proc/{pid}/fd/2") == str(run.folder / f"{role}.log")
            assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull

        os.kill(pids["worker-0"], signal.SIGKILL)
        pid = _next(run, "worker-0", 2)
        assert pid != pids["worker-0"] and _line(pid).startswith("rpruntime.worker worker-0")

        os.kill(server, signal.SIGKILL)
        os.kill(pids["worker-1"], signal.SIGKILL)
        pid = _next(run, "worker-1", 2)
        assert "-m rpruntime.worker" in _line(pid) and _children(launcher)["rp:worker-1"] == pid
        assert len(_children(launcher)) == 4

        os.kill(run.script_pid(), signal.SIGTERM)
        assert run.wait() == 143
        assert "server" not in run.err


def _stub(tmp_path: Path, code: str) -> str:
    """A PYTHONPATH on which torch is this code."""
    (tmp_path / "stub" / "torch").mkdir(parents=True)
    (tmp_path / "stub" / "torch" / "__init__.py").write_text(code)
    return os.pathsep.join([str(tmp_path / "stub"), str(ROOT)])


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    path = _stub(tmp_path, "raise ImportError('libtorch.so: cannot open shared object file')")
    with no_leaks() as watch:
        script = "import time\ntime.sleep(60)\n"
        run = rplaunch(tmp_path, watch, script, RPRUNTIME_CHILD_COMMAND="", PYTHONPATH=path)
        wait_until(lambda: run.err.count("did not start") == 3, 10.0)
        for role in ("optimizer", "worker-0 on cpu:0", "worker-1 on cpu:1"):
            assert f"{role} did not start: exit code 1: ImportError: libtorch" in run.err
        assert "Traceback" in (run.folder / "worker-0.log").read_text()
        os.kill(run.script_pid(), signal.SIGKILL)
        assert run.wait() == 137


def test_ctrl_c_during_the_imports_ends_everything(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = _stub(tmp_path, f"import time\nopen({str(mark)!r}, 'w').close()\ntime.sleep(60)\n")
    with no_leaks(within_s=3.0) as watch:
        script = "import time\nprint('began', flush=True)\ntime.sleep(60)\n"
        run = rplaunch(tmp_path, watch, script, RPRUNTIME_CHILD_COMMAND="", PYTHONPATH=path)
        wait_until(mark.exists, 10.0)
        run.wait_for("began")
        run.kill_group(signal.SIGINT)
        assert run.wait(5.0) == 130
