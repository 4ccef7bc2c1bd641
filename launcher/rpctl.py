"""rpctl: serves, watches and ends sessions, reads what runs have left, plans on paper. `_USAGE` has all commands."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import rpruntime
from launcher import planning
from launcher.choosing import Refused as _Refused
from launcher.choosing import choose_session as _choose
from launcher.choosing import running_sessions as _running
from launcher.choosing import take_flags as _flags
from launcher.doctor import doctor
from launcher.logs import logs
from launcher.screen import write
from launcher.serving import serve
from launcher.session import base_candidates, clean_sessions, list_sessions, read_session
from launcher.status import status
from launcher.top import top
from launcher.tracing import trace
from rpruntime.checkpoints.files import list_checkpoints
from rpruntime.errors import RoundPipeError
from rpruntime.process import open_pidfd, start_time

_STOP_TIMEOUT_S = 30.0
_USAGE = """usage: rpctl COMMAND [arguments]

  rpctl status [NAME] [--json]   sessions that run, and their processes
  rpctl top [NAME] [--once] [--json]   what a session is doing, live
  rpctl logs [NAME] [ROLE] [-f]  a session's logs, of one process or the end of each; -f follows
  rpctl serve [--detach] [FLAGS] a session without a script, for rp.init(name=...); FLAGS as of rplaunch
  rpctl stop NAME                end a session (under rplaunch: SIGTERM to the script)
  rpctl clean [--logs]           remove what dead sessions left; their logs too with --logs
  rpctl checkpoint FOLDER [--json]   checkpoints in a folder: step, size, date, complete or not
  rpctl doctor [--json]          what of this machine would stop a run, and how to mend it
  rpctl trace FILE               where a recorded run's time went, and a picture (rpctl trace --help)
  rpctl plan FILE|MODEL          cut layers into stages; what a MODEL will need (rpctl plan --help)
  rpctl simulate FILE            compare schedules on measured layers (rpctl simulate --help)

  rpctl --version

NAME may be left out where there is one session."""

_HELP = {
    "status": "NAME: only this session. --json: for programs.",
    "logs": "ROLE: controller (the script), optimizer, worker-0, or a device as cuda:0; its whole log. Without it\n"
    "the last lines of each. -f: goes on with what comes, until the session ends or Ctrl-C.\n"
    "Without NAME the session that runs; if none does, the newest that has logs.",
    "serve": "Prints its name when it is ready; ends with Ctrl-C or rpctl stop. Scripts come and go, models stay.\n"
    "--detach: goes on in the background. FLAGS: rplaunch --help.",
    "stop": "Under rplaunch the script gets SIGTERM and --shutdown-timeout seconds; else the session's processes end\n"
    "and the script gets SessionLost. Waits for the end.",
    "checkpoint": "Oldest first; load_checkpoint takes the newest complete one. --json: for programs.",
    "clean": "Sessions that run are left alone. --logs: the logs of dead ones too.",
}


MAX_NAMES = 20
"""Of cleaned sessions that are told one by one."""


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if words else 2
    commands: dict[str, Callable[[list[str]], int]] = {
        "status": status, "serve": serve, "logs": logs, "stop": _stop, "clean": _clean,
        "checkpoint": _checkpoint, "doctor": doctor, "top": top, "trace": trace,
        "plan": planning.plan, "simulate": planning.simulate_schedules,
    }  # fmt: skip
    command, rest = words[0], words[1:]
    try:
        code = _run(commands, command, rest)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # `rpctl logs | head`
        _drop_output()
        return 0
    except OSError as err:
        _drop_output()
        write(sys.stderr, f"rpctl: {err}\n")
        return 1


def _drop_output() -> None:
    """Python tries to write what is left at its own end, and would exit with 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _run(commands: dict[str, Callable[[list[str]], int]], command: str, rest: list[str]) -> int:
    try:
        if command == "--version":
            print(f"rpruntime {rpruntime.__version__}")
            return 0
        if command not in commands:
            raise _Refused(f"there is no command {command}, see rpctl --help", 2)
        if command in _HELP and any(word in ("-h", "--help") for word in rest):
            usage = next(line for line in _USAGE.splitlines() if line.startswith(f"  rpctl {command} "))
            print(f"usage:{usage[1:]}\n\n{_HELP[command]}")
            return 0
        return commands[command](rest)
    except _Refused as err:
        write(sys.stderr, f"rpctl: {err}\n")
        return err.code
    except RoundPipeError as err:
        write(sys.stderr, f"rpctl: {err}\n")
        return 1


def _checkpoint(words: list[str]) -> int:
    flags, folders = _flags(words, ("--json",))
    if len(folders) != 1:
        raise _Refused("checkpoint needs a folder, see rpctl --help", 2)
    if not os.path.isdir(folders[0]):
        raise _Refused(f"there is no folder {folders[0]}")
    found = list_checkpoints(folders[0])
    if "--json" in flags:
        rows = [
            {
                "step": entry.step,
                "path": str(entry.path),
                "bytes": entry.nbytes,
                "date": entry.date,
                "complete": entry.complete,
                "reason": entry.reason,
            }
            for entry in found
        ]
        print(json.dumps(rows))
        return 0
    if not found:
        print(f"no checkpoint in {folders[0]}")
        return 0
    print(f"{'STEP':>9}  {'SIZE':>11}  {'DATE':16}  NAME")
    for entry in found:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.date))
        size = f"{entry.nbytes / 2**20:.1f} MiB"
        print(f"{entry.step:>9}  {size:>11}  {date}  {entry.path.name}{entry.reason and f'  {entry.reason}'}")
    return 0


def _stop(words: list[str]) -> int:
    _, names = _flags(words, ())
    path = _choose(names[0] if names else None, _running())
    body = read_session(path)
    if body is None:
        return 0  # it has just ended
    pid, started = body["launcher"]["pid"], body["launcher"]["start_time"]
    try:
        pidfd = open_pidfd(pid, started)
    except ProcessLookupError:
        return 0
    if pidfd >= 0:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    else:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while start_time(pid) == started and time.monotonic() < deadline:
        time.sleep(0.05)
    if start_time(pid) == started:
        raise _Refused(f"session {path.name} (launcher {pid}) did not end within {_STOP_TIMEOUT_S:.0f} s of SIGTERM")
    print(f"session {path.name} has ended")
    return 0


def _clean(words: list[str]) -> int:
    given, _ = _flags(words, ("--logs",))
    cleaned = []
    for base in base_candidates():
        if list_sessions([base]):
            cleaned += clean_sessions(base, logs="--logs" in given)
    more = f" and {len(cleaned) - MAX_NAMES} more" if len(cleaned) > MAX_NAMES else ""
    print("cleaned: " + ", ".join(cleaned[:MAX_NAMES]) + more if cleaned else "nothing to clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
