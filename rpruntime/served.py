"""Sessions that outlive a script: started by `rpctl serve`, found by name, their controller's place taken.

FOLDER/controller.lock   held (lockf) by the process that controls the session; its content says who that is
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpruntime.errors import ConfigError
from rpruntime.process import start_time

LOCK_FILE = "controller.lock"


def all_sessions() -> list[Path]:
    """Folders of the sessions of this user that run."""
    first = f"/tmp/rpruntime-{os.getuid()}"
    found = []
    for base in (Path(first), *(Path(f"{first}.{number}") for number in range(1, 5))):
        if base.is_dir() and base.lstat().st_uid == os.getuid():
            found += [path for path in sorted(base.iterdir()) if path.is_dir() and _is_running(path)]
    return found


def _is_running(folder: Path) -> bool:
    body = read_session(folder)
    if body is None:
        return False
    launcher = body["launcher"]
    return start_time(launcher["pid"]) == launcher["start_time"]


def is_served(folder: Path) -> bool:
    """Whether a session outlives its scripts."""
    body = read_session(folder)
    return body is not None and bool(body["config"].get("served"))


def read_session(folder: Path) -> dict[str, Any] | None:
    """A folder's session.json; None: there is none (any more)."""
    try:
        body: dict[str, Any] = json.loads((folder / "session.json").read_text())
    except (OSError, ValueError):
        return None
    return body


def find_served(name: str | None) -> Path | None:
    """The served session of this name, or the only one (None: there is none).

    Raises:
        ConfigError: there are several and no name was given.
    """
    found = [path for path in all_sessions() if name in (None, path.name) and is_served(path)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"several sessions are served: {names}; say which one")
    return found[0] if found else None


@dataclass(frozen=True)
class Place:
    """The controller's place in a session: the lock's descriptor and which controller this is."""

    fd: int
    incarnation: int

    def leave(self) -> None:
        """Somebody else can have it."""
        os.close(self.fd)


def take_place(folder: Path) -> Place:
    """Become the controller, number n + 1.

    A record lock (`lockf`), as it belongs to the process: the kernel takes it from a dead one, and a forked child
    neither has it nor can drop it.

    Raises:
        ConfigError: another process has the place; says which.
    """
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = _read(fd)
        os.close(fd)
        raise ConfigError(
            f"session {folder.name} is used by {described(holder)}; one controller at a time (to look only: "
            "rp.Client.attach(observe=True) or rpctl; a script started by that process needs RPRUNTIME_SESSION unset "
            "to get a session of its own)"
        ) from None
    number = int(_read(fd).get("incarnation", 0)) + 1
    body = {"incarnation": number, "pid": os.getpid(), "argv": command(), "since": time.time()}
    try:  # in one write, over all that was there: a death in the middle must not lose count
        os.pwrite(fd, json.dumps(body).encode().ljust(os.fstat(fd).st_size), 0)
    except OSError:
        os.close(fd)
        raise
    return Place(fd, number)


def command() -> list[str]:
    """This process's command line, shortened."""
    return [word[:200] for word in (getattr(sys, "orig_argv", None) or sys.argv)[:20]]


def described(holder: dict[str, Any]) -> str:
    """Who has the place, in words."""
    if "pid" not in holder:
        return "another process"
    when = time.strftime("%H:%M:%S", time.localtime(float(holder.get("since", 0))))
    return f"process {holder['pid']} ({' '.join(holder.get('argv', []))}) since {when}"


def _read(fd: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(fd, 65536, 0).decode(errors="replace") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
