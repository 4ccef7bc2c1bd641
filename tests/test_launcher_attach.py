"""The script's side: `rp.init`, attaching, closing, forks (case D3), and rpctl."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import choosing, logs, rpctl
from tests.launching import ROOT, WAIT_READY, plain_python, rplaunch
from tests.leaks import no_leaks, wait_until


def test_import_is_light() -> None:
    code = """
import sys, rpruntime, rpruntime.wire, rpruntime.process, rpruntime.errors, launcher.launch
assert "torch" not in sys.modules and "zmq" in sys.modules
print(rpruntime.__version__, rpruntime.ConfigError.__mro__[1].__name__, "RoundPipe" in dir(rpruntime))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["0.1.0", "RoundPipeError", "True"]
    code = "import sys, rpruntime, rpruntime.wire; assert not {'torch', 'zmq'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    with pytest.raises(AttributeError, match="nonsense"):
        __import__("rpruntime").nonsense  # noqa: B018


def test_plain_python(tmp_path: Path) -> None:
    script = """
import rpruntime as rp
with rp.init("cpu:3", name="my-run", max_restarts=7, quiet=False) as session:
    session.wait_ready()
    print(session.name, session.devices, session.folder.name, sorted(session.ready), session.worker_roles)
    print(session.config["max_restarts"], session.config["devices"], session.config["threads_per_worker"])
    print(rp.init() is session, rp.init("cpu:3", max_restarts=7) is session)
    for wrong in ({"devices": "cpu:2"}, {"max_restarts": 8}, {"name": "other"}, {"nonsense": 1}):
        try:
            rp.init(**wrong)
        except rp.ConfigError as err:
            print(err)
print(session.closed, session.folder.joinpath("session.json").exists())
again = rp.init("cpu:1")
print(again is session, again.devices)
"""
    with no_leaks() as watch:
        run = plain_python(tmp_path, watch, script)
        assert run.wait() == 0, run.err
        lines = run.out.splitlines()
        assert lines[0] == (
            "my-run ('cpu:0', 'cpu:1', 'cpu:2') my-run ['optimizer', 'worker-0', 'worker-1', 'worker-2'] "
            "('worker-0', 'worker-1', 'worker-2')"
        )
        assert lines[1].startswith("7 ('cpu:0', 'cpu:1', 'cpu:2') ")
        assert lines[2] == "True True"
        for line in lines[3:6]:
            assert "session my-run is running with" in line
            assert "call session.close() first" in line
        assert "no argument 'nonsense'" in lines[6]
        assert lines[7:] == ["True False", "False ('cpu:0',)"]
        assert run.err.count("rpruntime 0.1  session") == 2
        assert run.err.splitlines()[0].startswith("rpruntime: no session my-run is served, so this script starts one")


def test_settings_by_variable(tmp_path: Path) -> None:
    with no_leaks() as watch:
        script = WAIT_READY + "print(session.devices, session.name)"
        run = plain_python(
            tmp_path,
            watch,
            script,
            RPRUNTIME_DEVICES="cpu:1",
            RPRUNTIME_QUIET="1",
            RPRUNTIME_NAME="by-variable",
        )
        assert run.wait() == 0
        assert run.out == "('cpu:0',) by-variable\n"
        assert run.err == ""


def test_conflict_with_rplaunch(tmp_path: Path) -> None:
    script = """
import rpruntime as rp
session = rp.init("cpu:2")
print(session.under_rplaunch, session.devices, rp.init(max_restarts=2) is session)
for wrong in ({"devices": "cpu:3"}, {"devices": "cuda"}, {"shutdown_timeout": 5}, {"devices": "inline"}):
    try:
        rp.init(**wrong)
    except rp.ConfigError as err:
        print(err)
class Client:
    def close(self):
        print("client closed before the mailbox:", session.post.receive() is not None)
session.client = Client()
session.close()
session.close()
again = rp.init()
again.wait_ready()
print(again is session, again.name == session.name, len(again.segments.create(100)[1]))
"""
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, flags=("--devices", "cpu:2"))
        assert run.wait() == 0, run.err
        lines = run.out.splitlines()
        assert lines[0] == "True ('cpu:0', 'cpu:1') True"
        assert "rp.init(devices='cpu:3') conflicts with rplaunch, which has devices 'cpu:2'" in lines[1]
        assert "--shutdown-timeout or RPRUNTIME_SHUTDOWN_TIMEOUT" in lines[3]
        assert lines[5] == "client closed before the mailbox: True"
        assert lines[6] == "False True 100"


@pytest.mark.parametrize(
    "call, error",
    [
        ("'cuda'", "ConfigError: CUDA_VISIBLE_DEVICES='' leaves no CUDA device visible"),
        pytest.param("'cpu:0'", "ConfigError: --devices cpu:0", marks=pytest.mark.slow),
        pytest.param("name='a/b'", "ConfigError: --name", marks=pytest.mark.slow),
        ("tee='x'", "ConfigError: rp.init(tee=...)"),
    ],
)
def test_wrong_settings(tmp_path: Path, call: str, error: str) -> None:
    with no_leaks() as watch:
        script = f"import rpruntime as rp\nrp.init({call})"
        run = plain_python(tmp_path, watch, script, CUDA_VISIBLE_DEVICES="")
        assert run.wait() == 1
        assert error in run.err.splitlines()[-1]


def test_name_in_use(tmp_path: Path) -> None:
    with no_leaks() as watch:
        script = WAIT_READY + "print('ready', flush=True)\nimport time\ntime.sleep(60)"
        first = rplaunch(tmp_path / "a", watch, script, flags=("--name=twice",))
        first.wait_for("ready")
        second = rplaunch(tmp_path / "b", watch, "print('must not run')", flags=("--name=twice",))
        assert second.wait() == 1
        assert "a session named twice is running" in second.err
        assert second.out == ""
        first.kill_group(signal.SIGTERM)
        assert first.wait() == 143


@pytest.mark.parametrize("how", [rplaunch, pytest.param(plain_python, marks=pytest.mark.slow)])
def test_forked_child_runs_no_cleanup(tmp_path: Path, how) -> None:
    """D3: children that end by themselves leave session and segments alone."""
    script = (
        WAIT_READY
        + """
import multiprocessing, os, sys
import rpruntime as rp
segment, memory = session.segments.create(4096)
def work(number):
    memory[number] = number
    return session.segments.open(segment)[number]
child = os.fork()
if child == 0:
    try:
        rp.init()
    except rp.RoundPipeError as err:
        print("refused:", err, flush=True)
    session.close()
    sys.exit(0)
os.waitpid(child, 0)
for _ in range(3):
    context = multiprocessing.get_context("fork")
    loaders = [context.Process(target=work, args=(number,)) for number in range(1, 5)]
    for loader in loaders:
        loader.start()
    for loader in loaders:
        loader.join()
print(bytes(memory[:5]), len(session.segments.create(10)[1]), session.launcher_alive(), len(session.ready))
"""
    )
    with no_leaks() as watch:
        run = how(tmp_path, watch, script, **{"PYTHONWARNINGS": "error"} if sys.version_info < (3, 12) else {})
        assert run.wait() == 0, run.err
        assert "refused: this process was forked" in run.out
        assert "b'\\x00\\x01\\x02\\x03\\x04' 10 True 3" in run.out


def test_few_descriptors(tmp_path: Path) -> None:
    """D3: `ulimit -n 256` is enough, and descriptors do not grow."""
    script = (
        WAIT_READY
        + """
import os
before = None
for count in range(100):
    segment, memory = session.segments.create(4096)
    session.segments.release(segment)
    del memory
    now = len(os.listdir("/proc/self/fd"))
    before = before or now
    assert now <= before, (before, now)
print("flat")
"""
    )
    with no_leaks() as watch:
        wrapped = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n{script}"
        run = plain_python(tmp_path, watch, wrapped)
        assert run.wait() == 0, run.err
        assert run.out == "flat\n"


def test_memory_refusal_reaches_the_script(tmp_path: Path) -> None:
    script = (
        WAIT_READY
        + """
from rpruntime.errors import HostMemoryError
try:
    session.segments.create(1 << 50)
except HostMemoryError as err:
    print(err)
"""
    )
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script)
        assert run.wait() == 0, run.err
        for text in ("1048576.0 GiB", "/dev/shm", "cgroup limit", "RAM"):
            assert text in run.out


def test_environment_of_children(tmp_path: Path) -> None:
    script = (
        WAIT_READY
        + """
import os
visible = {role: info["visible"] for role, info in sorted(session.ready.items())}
print(visible, os.environ.get("CUDA_VISIBLE_DEVICES"))
"""
    )
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, CUDA_VISIBLE_DEVICES="3,1")
        assert run.wait() == 0, run.err
        assert run.out.splitlines()[0] == "{'optimizer': '', 'worker-0': '', 'worker-1': ''} 3,1"


def test_log_dir(tmp_path: Path) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, WAIT_READY, flags=("--log-dir", "my logs", "--name", "logged"))
        assert run.wait() == 0, run.err
        folder = tmp_path / "my logs" / "logged"
        assert f"logs: {folder}/" in run.err
        assert sorted(path.name for path in folder.iterdir()) == [
            "optimizer.log",
            "worker-0.log",
            "worker-1.log",
        ]
        assert "worker-0 INFO started on cpu:0" in (folder / "worker-0.log").read_text()
        assert not run.folder.exists()


def test_rpctl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with no_leaks() as watch:
        script = WAIT_READY + "print('ready', flush=True)\nimport time\ntime.sleep(60)"
        run = rplaunch(tmp_path, watch, script, "--lr=1")
        run.wait_for("ready")
        name = run.folder.name
        run.wait_children()

        assert rpctl.main(["status", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        row = rows[name]
        assert row["launcher_pid"] == run.popen.pid
        assert row["argv"][1:] == ["--lr=1"]
        assert row["devices"] == ["cpu:0", "cpu:1"]
        assert {role["role"]: role["state"] for role in row["roles"]} == {
            "optimizer": "ready", "worker-0": "ready", "worker-1": "ready",
        }  # fmt: skip
        assert "keys" not in row
        assert "token" not in row

        assert rpctl.main(["status", name]) == 0
        assert re.search(r"worker-1 +cpu:1 +pid \d+ +ready", capsys.readouterr().out)
        assert rpctl.main(["logs", name, "cpu:1"]) == 0
        assert "started on cpu:1" in capsys.readouterr().out
        assert rpctl.main(["logs", name]) == 0
        assert capsys.readouterr().out.count("==>") == 3
        assert rpctl.main(["logs", name, "nobody"]) == 1
        assert "only of optimizer, worker-0, worker-1" in capsys.readouterr().err

        # `stop` waits for the launcher, whose exit only we can collect.
        stop = subprocess.Popen([sys.executable, "-m", "launcher.rpctl", "stop", name], cwd=ROOT)
        assert run.wait() == 143
        assert stop.wait(10) == 0
        assert rpctl.main(["status", name]) == 1
        assert f"no session {name}" in capsys.readouterr().err


def test_rpctl_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert rpctl.main(["nonsense"]) == 2
    assert rpctl.main([]) == 2
    assert rpctl.main(["status", "--nonsense"]) == 2
    assert rpctl.main(["--help"]) == 0
    capsys.readouterr()
    for command in ("status", "serve", "logs", "stop", "clean"):
        assert rpctl.main([command, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: rpctl {command} ")
    assert rpctl.main(["--version"]) == 0
    assert capsys.readouterr().out == "rpruntime 0.1.0\n"
    for command in ("status", "logs", "stop"):
        assert rpctl.main([command, "no-such-session"]) == 1
        assert capsys.readouterr().err == "rpctl: no session no-such-session\n"


def test_logs_of_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (choosing, logs):
        monkeypatch.setattr(module, "list_sessions", lambda *_: sorted(tmp_path.iterdir()))
    assert rpctl.main(["logs"]) == 1
    assert "none has left logs" in capsys.readouterr().err
    for age, name in enumerate(("calm-otter", "bold-yak", "wise-owl")):
        (tmp_path / name).mkdir()
        log = tmp_path / name / "worker-0.log"
        log.write_text(f"of {name}\n")
        os.utime(log, (1e9 - age, 1e9 - age))
    assert rpctl.main(["logs"]) == 0
    printed = capsys.readouterr()
    assert "of calm-otter" in printed.out and "of bold-yak" not in printed.out
    assert printed.err == "rpctl: no session is running; the newest is calm-otter\n"
    assert rpctl.main(["logs", "cpu:0"]) == 0
    assert capsys.readouterr().out == "of calm-otter\n"


@pytest.mark.parametrize("words, code", [(["--help"], 1), (["--version"], 1), (["status"], 1), (["nonsense"], 2)])
def test_full_devices(words: list[str], code: int) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "launcher.rpctl", *words], cwd=ROOT, stdout=full, stderr=full, check=False
        )
    assert done.returncode == code


def test_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with no_leaks(sockets=False) as watch:
        run = rplaunch(tmp_path, watch, WAIT_READY + "print('ready', flush=True)\nimport time\ntime.sleep(60)")
        run.wait_for("ready")
        script = run.script_pid()
        run.popen.kill()
        run.wait()
        os.kill(script, signal.SIGKILL)
    assert list(run.folder.glob("*.sock"))
    wait_until(lambda: rpctl.main(["clean"]) == 0, 5.0)
    assert not list(run.folder.glob("*.sock"))
    assert list(run.folder.glob("*.log"))
    capsys.readouterr()
