"""`rpctl logs`: what the processes of a session have logged, also while they go on."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Any

from launcher.choosing import Refused, choose_session, running_sessions, take_flags
from launcher.screen import write
from launcher.session import is_alive, list_sessions, read_session

POLL_S = 0.2
LAST_LINES = 10
_ROLE = re.compile(r"controller|optimizer|forkserver|worker-\d+|(cuda|cpu):\d+")


def logs(words: list[str]) -> int:
    """The command; returns the exit code."""
    given, names = take_flags(words, ("-f", "--follow"))
    everything = list_sessions()
    by_name = {path.name: path for path in everything}
    if names and names[0] in by_name:
        folder, roles = by_name[names[0]], names[1:]
    else:
        folder, roles = _session_of_logs(names, everything), names
    body = read_session(folder)
    log_dir = Path(body["config"]["log_dir"]) if body is not None else folder
    role = _role_name(roles[0], body) if roles else None
    follow = bool(given)
    if role is not None and not (log_dir / f"{role}.log").exists() and not (follow and is_alive(folder)):
        there = ", ".join(path.stem for path in sorted(log_dir.glob("*.log")))
        raise Refused(f"session {folder.name} has no log of {roles[0]}, only of {there or 'nobody'}")
    if follow:
        with contextlib.suppress(KeyboardInterrupt):  # that is how following ends
            _follow(folder, log_dir, role)
    elif role is not None:
        print((log_dir / f"{role}.log").read_text(errors="replace"), end="")
    else:
        for log in sorted(log_dir.glob("*.log")):
            print(f"==> {log} <==")
            print("\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]))
    return 0


def _follow(folder: Path, log_dir: Path, role: str | None) -> None:
    """Print what is there, then what comes, until the session has ended."""
    tails: dict[Path, _Tail] = {}
    first = True
    while True:
        alive = is_alive(folder)  # before reading: what was written before the end is read after it
        for path in [log_dir / f"{role}.log"] if role is not None else sorted(log_dir.glob("*.log")):
            if path not in tails:
                tails[path] = _Tail(path, f"[{path.stem}] " if role is None else "", cut=first and role is None)
            for line in tails[path].new_lines(last=not alive):
                print(line)
        sys.stdout.flush()
        if not alive:
            return
        first = False
        time.sleep(POLL_S)


class _Tail:
    """A log from some line on. `cut`: only its last lines and what follows."""

    def __init__(self, path: Path, prefix: str, *, cut: bool) -> None:
        self._path, self._prefix, self._cut = path, prefix, cut
        self._offset = 0

    def new_lines(self, *, last: bool) -> list[str]:
        """Whole lines that have come since; at the `last` call also an unfinished one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []  # not there yet, or removed as it was empty
        end = len(data) if last else data.rfind(b"\n") + 1
        self._offset += end
        lines = data[:end].decode(errors="replace").splitlines()
        if self._cut:
            lines, self._cut = lines[-LAST_LINES:], False
        return [self._prefix + line for line in lines]


def _session_of_logs(words: list[str], everything: list[Path]) -> Path:
    """The session that runs, else the newest that left logs."""
    if len(words) > 1 or (words and not _ROLE.fullmatch(words[0])):
        raise Refused(f"no session {words[0]}")
    running = running_sessions()
    if running:
        return choose_session(None, running)
    found = [log for path in everything for log in path.glob("*.log")]
    if not found:
        raise Refused("no session is running, and none has left logs")
    newest = max(found, key=lambda log: log.stat().st_mtime).parent
    write(sys.stderr, f"rpctl: no session is running; the newest is {newest.name}\n")
    return newest


def _role_name(word: str, body: dict[str, Any] | None) -> str:
    """A device's name stands for its worker."""
    if body is None:  # ended: its list of devices is gone
        return f"worker-{word[4:]}" if re.fullmatch(r"cpu:\d+", word) else word
    names = body["config"]["devices"]
    return f"worker-{names.index(word)}" if word in names else word
