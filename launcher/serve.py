"""The launcher as a process of its own, at the side of a script that runs under plain python.

    python launcher/__main__.py --watch-pid PID --watch-start TICKS --ready-fd FD [--sys-path JSON] [flags]

`rpruntime.session` starts it in a new session (Ctrl-C does not reach it). It writes one line of JSON to FD,
{"folder": ...} or {"error": ...}, and ends when the script ends, when the controller says so, or at SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from launcher.launch import STOPPED, Launcher
from launcher.plan import begin_session, make_plan
from launcher.screen import Screen, hold_standard_descriptors
from launcher.wakeup import Wakeup
from rpruntime import flags
from rpruntime.errors import RoundPipeError
from rpruntime.process import open_pidfd, start_time


def main(argv: list[str]) -> int:
    """Serve one script."""
    own: dict[str, str] = {}
    words = list(argv)
    while words and words[0] in ("--watch-pid", "--watch-start", "--ready-fd", "--sys-path"):
        own[words[0]], words = words[1], words[2:]
    pid, started = int(own["--watch-pid"]), int(own["--watch-start"])
    ready_fd = int(own["--ready-fd"])
    os.set_inheritable(ready_fd, False)
    hold_standard_descriptors()
    wakeup = Wakeup()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes ends the script, which is what counts
    wakeup.install((signal.SIGTERM, signal.SIGCHLD))
    launcher = None
    try:
        given = flags.parse(words).given
        settings = flags.settings(given)
        pidfd = open_pidfd(pid, started)
        plan = make_plan(settings, json.loads(own.get("--sys-path", "[]")))
        screen = Screen(settings["quiet"])
        folder = begin_session(plan, screen, {"pid": pid, "argv": _command_line(pid)})
        launcher = Launcher(plan, folder, screen, wakeup)
        launcher.start()
    except ProcessLookupError:
        return 1  # the script ended meanwhile
    except (RoundPipeError, OSError) as err:
        _report(ready_fd, {"error": str(err), "type": type(err).__name__})
        if launcher is not None:
            launcher.end(at_once=True)
        return 1
    except BaseException:
        if launcher is not None:
            launcher.end(at_once=True)
        raise
    try:
        _report(ready_fd, {"folder": str(launcher.folder.path)})
        _watch(launcher, wakeup, pid, started, pidfd)
    finally:
        launcher.end()
    return 0


def _watch(launcher: Launcher, wakeup: Wakeup, pid: int, started: int, pidfd: int) -> None:
    while not launcher.shutdown_asked:
        if launcher.turn((pidfd,) if pidfd >= 0 else ()):
            return
        if pidfd < 0 and start_time(pid) != started:
            return
        if any(number == signal.SIGTERM for number, _ in wakeup.take()):
            launcher.why_it_ends = STOPPED
            return


def _command_line(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words[:-1]]


def _report(fd: int, body: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a script that is gone will be seen by the watch
        os.write(fd, json.dumps(body).encode() + b"\n")
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
