"""Session folders: `/tmp/rpruntime-UID/NAME/` with `session.json`, sockets and a log per process.

    base/            0700, ours; if another user has put something there, base.1, base.2... are tried
    base/.lock       held (flock) while folders are made or cleaned
    base/NAME/lock   held (flock) by the launcher for life: its state is known across pid namespaces too
    base/NAME/session.json   0600: version, pids, keys, token, config; replaced as a whole, never half-written

TMPDIR is not used: paths of Unix sockets end at 107 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.names import random_name
from rpruntime.errors import ConfigError
from rpruntime.private_files import write_private
from rpruntime.process import start_time

FORMAT_VERSION = 1
SESSION_FILE = "session.json"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,39}")
_NUM_BASES = 5


def base_candidates() -> list[Path]:
    """Where this user's sessions may be, in order of preference."""
    first = f"/tmp/rpruntime-{os.getuid()}"
    return [Path(first), *(Path(f"{first}.{number}") for number in range(1, _NUM_BASES))]


@dataclass(frozen=True, slots=True)
class Base:
    """The folder of all sessions, and a sentence if it is not the usual one."""

    path: Path
    warning: str = ""


def make_base(candidates: list[Path] | None = None) -> Base:
    """Make or check the parent of session folders.

    Raises:
        ConfigError: every candidate belongs to somebody else.
    """
    problems: list[str] = []
    for path in base_candidates() if candidates is None else candidates:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        problem = folder_problem(path)
        if problem is None:
            warning = f"{problems[0]}; using {path}" if problems else ""
            return Base(path, warning)
        problems.append(problem)
    raise ConfigError(f"no folder for the session: {problems[0]}; remove it or have its owner do so")


def folder_problem(path: Path) -> str | None:
    """Why a folder cannot hold this user's sessions; None: it can."""
    try:
        found = path.lstat()
    except OSError as err:
        return f"{path} cannot be read ({err.strerror})"
    if found.st_uid != os.getuid():
        return f"{path} belongs to uid {found.st_uid}, not to you (uid {os.getuid()})"
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is in the way and no folder"
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return None


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    fd = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@dataclass
class SessionFolder:
    """A live session's folder, held by its launcher."""

    path: Path
    keys: tuple[str, str]
    token: str
    config: dict[str, Any]
    script: dict[str, Any]
    roles: dict[str, dict[str, Any]] = field(default_factory=dict)
    controller: dict[str, Any] | None = None
    """Who is attached."""
    began: float = field(default_factory=time.time)
    _lock_fd: int = -1

    @property
    def name(self) -> str:
        """The session's name."""
        return self.path.name

    def save(self) -> None:
        """Write session.json anew."""
        body = {
            "version": FORMAT_VERSION,
            "name": self.name,
            "folder": str(self.path),
            "launcher": {"pid": os.getpid(), "start_time": start_time(os.getpid())},
            "script": self.script,
            "keys": list(self.keys),
            "token": self.token,
            "config": self.config,
            "roles": self.roles,
            "controller": self.controller,
            "began": self.began,
            "written": time.time(),
        }
        write_private(self.path / SESSION_FILE, json.dumps(body, indent=1).encode())

    def remove(self) -> None:
        """Remove all but the logs that say something; the folder too if nothing is left."""
        with _locked(self.path.parent):
            _remove_remains(self.path)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def check_name(name: str | None) -> None:
    """Raises ConfigError if a session cannot have this name."""
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: at most 40 letters, digits, '-', '_' and '.', the first a letter or digit")


def create_session(base: Path, name: str | None, config: dict[str, Any], script: dict[str, Any]) -> SessionFolder:
    """Make the folder of a new session; its keys come later. `config` gets `log_dir`, if it has none.

    Raises:
        ConfigError: the name is unfit or a live session has it.
    """
    check_name(name)
    with _locked(base):
        path = _make_folder(base, name)
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        log_dir = Path(config["log_dir"]).absolute() / path.name if config.get("log_dir") else path
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = SessionFolder(
            path, ("", ""), secrets.token_hex(16), {**config, "log_dir": str(log_dir)}, script, _lock_fd=lock_fd
        )
        folder.save()
        return folder


def _make_folder(base: Path, name: str | None) -> Path:
    if name is not None:
        path = base / name
        if path.exists():
            if is_alive(path):
                raise ConfigError(f"a session named {name} is running ({path}): choose another --name or stop it")
            _remove_remains(path)
        path.mkdir(mode=0o700, exist_ok=True)
        return path
    for attempt in range(1000):
        path = base / (random_name() if attempt < 100 else f"{random_name()}-{secrets.token_hex(2)}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise ConfigError(f"no free name in {base}: `rpctl clean --logs` removes old logs")


def read_session(path: Path) -> dict[str, Any] | None:
    """The content of a folder's session.json; None if there is none (any more)."""
    try:
        body = json.loads((path / SESSION_FILE).read_text())
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def is_alive(path: Path) -> bool:
    """Whether a launcher serves this folder: it has the lock, or its process (pid and start) exists."""
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    body = read_session(path)
    if body is None:
        return False
    launcher = body["launcher"]
    return start_time(launcher["pid"]) == launcher["start_time"] and launcher["pid"] != os.getpid()


def list_sessions(bases: list[Path] | None = None) -> list[Path]:
    """Folders of all sessions, dead ones and those of which only logs are left included."""
    found = []
    for base in base_candidates() if bases is None else bases:
        if base.is_dir() and folder_problem(base) is None:
            found += sorted(path for path in base.iterdir() if path.is_dir() and not path.is_symlink())
    return found


def is_leftover(path: Path, *, logs: bool = False) -> bool:
    """Whether `clean_sessions` would remove this folder: its session is dead, and there is more than logs."""
    try:
        files = list(path.iterdir())
    except FileNotFoundError:  # its launcher has just removed it
        return False
    only_logs = bool(files) and all(file.suffix == ".log" for file in files)
    return not is_alive(path) and (logs or not only_logs)


def clean_sessions(base: Path, *, logs: bool = False) -> list[str]:
    """Remove what dead sessions left, except logs (those too with `logs`). Returns the names."""
    cleaned = []
    with _locked(base):
        for path in list_sessions([base]):
            if not is_leftover(path, logs=logs):
                continue
            if logs:
                for file in path.glob("*.log"):
                    file.unlink(missing_ok=True)
            _remove_remains(path)
            cleaned.append(path.name)
    return cleaned


def _remove_remains(path: Path) -> None:
    """Sockets, json and empty logs of a dead session; the folder if that was all."""
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file, ignore_errors=True)
            elif file.suffix != ".log" or file.stat().st_size == 0:
                file.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()
