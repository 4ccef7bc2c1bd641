"""`rpctl serve`: a session without a script, until `rpctl stop` (or Ctrl-C in the foreground).

rpctl serve [--detach] [flags of rplaunch]
  --detach: python launcher/__main__.py --serve FD [flags], in a session of its own; it says on FD when it is ready
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launcher.choosing import Refused
from launcher.screen import Screen, hold_standard_descriptors
from launcher.wakeup import Wakeup
from rpruntime import flags
from rpruntime.errors import ConfigError, RoundPipeError

READY_TIMEOUT_S = 300.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(words: list[str]) -> int:
    """The command; returns the exit code."""
    own = [word for word in words if word != "--detach"]
    try:
        line = flags.parse(own)
        flags.settings(line.given)
    except flags.UsageError as err:
        raise Refused(str(err), 2) from err
    if line.target:
        raise Refused(f"serve takes no script, but {line.target!r} was given: attach one with rp.init(name=...)", 2)
    if "--detach" in words:
        return _detach(own)
    hold_standard_descriptors()
    wakeup = Wakeup()
    wakeup.install((*_ENDING, signal.SIGCHLD))
    try:
        return _serve(own, wakeup, None)
    finally:
        wakeup.close()


def serve_detached(words: list[str]) -> int:
    """The process that `--detach` starts: FD, then flags."""
    ready_fd = int(words[0])
    os.set_inheritable(ready_fd, False)
    hold_standard_descriptors()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    wakeup = Wakeup()
    wakeup.install((signal.SIGTERM, signal.SIGCHLD))
    try:
        return _serve(words[1:], wakeup, ready_fd)
    except (RoundPipeError, OSError) as err:
        _report(ready_fd, {"error": str(err)})
        return 1


def _serve(words: list[str], wakeup: Wakeup, ready_fd: int | None) -> int:
    from launcher.launch import STOPPED, Launcher
    from launcher.plan import begin_session, make_plan

    given = flags.parse(words).given
    settings = flags.settings(given)
    plan = make_plan(settings, [os.getcwd()])
    if not plan.devices:
        raise ConfigError("devices inline are those of a script's own process: they cannot be served")
    plan.config["served"] = True
    screen = Screen(settings["quiet"])
    folder = begin_session(plan, screen, {"pid": None, "argv": ["rpctl", "serve", *words]})
    launcher = Launcher(plan, folder, screen, wakeup)
    try:
        launcher.start()
        if not _wait_ready(launcher, wakeup):
            return 1
        if ready_fd is None:
            print(folder.name, flush=True)
            screen.say(f"rpruntime: serving; attach with rp.init(name={folder.name!r}), end with Ctrl-C or rpctl stop")
        else:
            _redirect(Path(folder.config["log_dir"]) / "launcher.log")
            _report(ready_fd, {"name": folder.name})
        while not _asked_to_end(wakeup):
            launcher.turn()
            if launcher.lost:
                screen.warn(f"rpruntime: the session ends: its {launcher.lost} is gone")
                return 1
        launcher.why_it_ends = STOPPED
        return 0
    finally:
        launcher.end()


def _wait_ready(launcher: Any, wakeup: Wakeup) -> bool:
    """Whether every process takes work; False: it is to end before.

    Raises:
        ConfigError: one could not start.
    """
    while True:
        launcher.turn()
        rows = launcher.folder.roles
        for role, row in rows.items():
            if row["state"] == "ended":
                raise ConfigError(f"{role} did not start: {row['reason']}; log {launcher.folder.config['log_dir']}")
        if rows and all(row["state"] != "starting" for row in rows.values()):
            return True
        if _asked_to_end(wakeup):
            return False


def _asked_to_end(wakeup: Wakeup) -> bool:
    return any(number in _ENDING for number, _ in wakeup.take())


def _redirect(log_file: Path) -> None:
    """The terminal may go: what there is to say from now on goes to a log."""
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _detach(words: list[str]) -> int:
    from launcher.supervisor import python_environ

    read_fd, write_fd = os.pipe()
    main_file = str(Path(__file__).resolve().parent / "__main__.py")
    try:
        process = subprocess.Popen(
            [sys.executable, main_file, "--serve", str(write_fd), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # whoever reads our output waits for its end
            env=python_environ(os.environ),
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    try:
        answer = _read_answer(read_fd, process)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        os.close(read_fd)
    if "error" in answer:
        process.wait()
        raise Refused(answer["error"])
    print(answer["name"], flush=True)
    return 0


def _read_answer(fd: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    data = b""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not data.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise Refused(f"the session is not ready after {READY_TIMEOUT_S:.0f} s")
        chunk = os.read(fd, 65536)
        if not chunk:
            return {"error": f"the session ended at its start, exit code {process.wait()}"}
        data += chunk
    found: dict[str, Any] = json.loads(data)
    return found


def _report(fd: int, body: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever started us may have gone
        os.write(fd, json.dumps(body).encode() + b"\n")
    with contextlib.suppress(OSError):
        os.close(fd)
