"""`rpctl status`: the sessions of this user, with their processes, controller, models and memory."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from launcher.choosing import choose_session, running_sessions, take_flags
from launcher.session import read_session
from rpruntime.errors import RoundPipeError
from rpruntime.looking import look_at


def status(words: list[str]) -> int:
    """The command; returns the exit code."""
    given, names = take_flags(words, ("--json",))
    running = running_sessions()
    chosen = [choose_session(names[0], running)] if names else running
    rows = [row for path in chosen if (row := describe(path)) is not None]
    if "--json" in given:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print("no session is running")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        print("\n".join(lines(row, width)))
    return 0


def describe(path: Path) -> dict[str, Any] | None:
    """What may be shown of a session: neither keys nor token."""
    body = read_session(path)
    if body is None:
        return None
    controller = body.get("controller")
    row: dict[str, Any] = {
        "name": body["name"],
        "folder": body["folder"],
        "log_dir": body["config"]["log_dir"],
        "served": bool(body["config"].get("served")),
        "age_s": round(time.time() - float(body.get("began", body["written"])), 1),
        "launcher_pid": body["launcher"]["pid"],
        "script_pid": body["script"].get("pid"),
        "argv": body["script"].get("argv", []),
        "devices": body["config"]["devices"],
        "controller": controller and {key: controller[key] for key in ("incarnation", "pid", "argv", "since")},
        "roles": [{"role": role, **found} for role, found in body["roles"].items()],
        "models": [],
        "memory_bytes": None,
    }
    if body["config"]["devices"]:
        try:
            seen = look_at(path, body, timeout_s=1.0)
        except (RoundPipeError, OSError):
            return row  # starting, ending, or busy
        row["models"] = seen.models
        row["memory_bytes"] = sum(seen.memory_bytes.values())
    return row


def lines(row: dict[str, Any], width: int | None = None) -> list[str]:
    """For people. `width`: of the terminal, in characters; longer lines are cut. None: there is none."""
    pids = f"launcher {row['launcher_pid']}" + (f", script {row['script_pid']}" if row["script_pid"] else "")
    found = [f"{row['name']}   {_age(row['age_s'])}   {pids}"]
    controller = row["controller"]
    if controller is not None:
        since = _age(time.time() - controller["since"])
        found.append(f"  controller   pid {controller['pid']} for {since}: {' '.join(controller['argv'])}")
    else:
        found.append(
            "  controller   none: attach with rp.init(name=...)" if row["served"] else "  controller   none yet"
        )
    for role in row["roles"]:
        state = role["state"] + (f": {role['reason']}" if role.get("reason") else "")
        nth = f" (process {role['incarnation']})" if role["incarnation"] > 1 else ""
        found.append(f"  {role['role']:<12} {role['device']:<8} pid {role['pid'] or '-':<8} {state}{nth}")
    for model in row["models"]:
        calls = f", {model['num_calls']} calls since" if model["num_calls"] else ""
        found.append(f"  model        {model['name']}: {model['step']} steps done{calls}")
    if row["memory_bytes"] is not None:
        found.append(f"  memory       {row['memory_bytes'] / 2**30:.2f} GiB shared")
    if width is not None:
        found = [line if len(line) <= width else f"{line[: max(0, width - 3)]}..."[:width] for line in found]
    # A path of which a part is missing is of no use.
    return [found[0], f"  logs         {row['log_dir']}/", *found[1:]]


def _age(seconds: float) -> str:
    seconds = max(0, int(seconds))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
