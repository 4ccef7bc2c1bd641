"""Session folders: private, unique, cleaned when dead, never another user's (case L6)."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.session import (
    clean_sessions,
    create_session,
    is_alive,
    list_sessions,
    make_base,
    read_session,
)
from rpruntime.errors import ConfigError
from rpruntime.process import start_time
from rpruntime.wire.mailbox import MAX_SOCKET_PATH_BYTES, socket_path


def config() -> dict[str, object]:
    return {"log_dir": None, "devices": ["cpu:0"]}


def test_folder_and_file(tmp_path: Path) -> None:
    base = make_base([tmp_path / "base"])
    session = create_session(base.path, None, config(), {"argv": ["x.py"]})
    assert stat.S_IMODE(session.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(base.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((session.path / "session.json").stat().st_mode) == 0o600
    body = read_session(session.path)
    assert body is not None
    assert body["launcher"] == {"pid": os.getpid(), "start_time": start_time(os.getpid())}
    assert body["config"]["log_dir"] == str(session.path)
    assert is_alive(session.path)
    session.remove()
    assert not session.path.exists()


def test_log_dir(tmp_path: Path) -> None:
    base = make_base([tmp_path / "base"])
    session = create_session(base.path, "calm-otter", {"log_dir": str(tmp_path / "my logs")}, {})
    assert session.config["log_dir"] == str(tmp_path / "my logs" / "calm-otter")
    assert Path(session.config["log_dir"]).is_dir()
    session.remove()


def test_many_names_are_unique(tmp_path: Path) -> None:
    sessions = [create_session(tmp_path, None, config(), {}) for _ in range(100)]
    assert len({session.name for session in sessions}) == 100
    for session in sessions:
        session.remove()


def test_named(tmp_path: Path) -> None:
    session = create_session(tmp_path, "mine", config(), {})
    with pytest.raises(ConfigError, match="a session named mine is running"):
        create_session(tmp_path, "mine", config(), {})
    (session.path / "worker-0.log").write_text("kept")
    session.remove()
    assert [path.name for path in session.path.iterdir()] == ["worker-0.log"]
    again = create_session(tmp_path, "mine", config(), {})
    assert (again.path / "worker-0.log").read_text() == "kept"
    for name in ("", "a/b", "..", ".x", "a b", "x" * 41):
        with pytest.raises(ConfigError, match="--name"):
            create_session(tmp_path, name, config(), {})
    again.remove()


def test_longest_socket_path_fits() -> None:
    path = socket_path(Path(f"/tmp/rpruntime-{2**32 - 1}.4") / ("x" * 40), "controller", 999999)
    assert len(str(path).encode()) <= MAX_SOCKET_PATH_BYTES


def _dead_session(base: Path) -> Path:
    """A folder whose launcher was killed."""
    code = """
import os, signal, sys
from pathlib import Path
from launcher.session import create_session
session = create_session(Path(sys.argv[1]), None, {"log_dir": None}, {})
(session.path / "launcher.1.sock").touch()
(session.path / "worker-0.log").write_text("last words")
(session.path / "worker-1.log").touch()
print(session.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code, str(base)], capture_output=True, text=True, cwd=root, check=False
    )
    return Path(done.stdout.strip())


def test_dead_folder_is_cleaned_and_its_logs_stay(tmp_path: Path) -> None:
    base = make_base([tmp_path / "base"]).path
    alive = create_session(base, None, config(), {})
    dead = _dead_session(base)
    assert not is_alive(dead)
    assert clean_sessions(base) == [dead.name]
    assert [path.name for path in dead.iterdir()] == ["worker-0.log"]
    assert read_session(alive.path) is not None
    assert clean_sessions(base) == []
    assert clean_sessions(base, logs=True) == [dead.name]
    assert list_sessions([base]) == [alive.path]
    alive.remove()


def test_pid_used_again_is_not_the_launcher(tmp_path: Path) -> None:
    dead = _dead_session(tmp_path)
    body = json.loads((dead / "session.json").read_text())
    sleeper = subprocess.Popen(["sleep", "60"])
    body["launcher"] = {"pid": sleeper.pid, "start_time": 1}
    (dead / "session.json").write_text(json.dumps(body))
    assert not is_alive(dead)
    body["launcher"]["start_time"] = start_time(sleeper.pid)
    (dead / "session.json").write_text(json.dumps(body))
    assert is_alive(dead)
    sleeper.kill()
    sleeper.wait()
    assert not is_alive(dead)


def test_base_in_the_way(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("")
    base = make_base([first, second])
    assert base.path == second
    assert str(first) in base.warning
    second.rmdir()
    second.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=f"{first} is in the way"):
        make_base([first, second])
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    make_base([folder])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_base_of_another_user(tmp_path: Path, kind: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir() if kind == "folder" else theirs.touch()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to uid 12345, not to you \(uid 0\); remove it") as caught:
        make_base([theirs])
    assert "\n" not in str(caught.value)
    assert make_base([theirs, tmp_path / "ours"]).path == tmp_path / "ours"
