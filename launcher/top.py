"""`rpctl top`: a running session, live in the terminal.

Everything is read from files of the session's folder: the launcher's session.json, the status page of each worker
(`rpruntime/status.py`) and the controller's page (`rpruntime/progress.py`). No process is asked for anything, so
watching costs the run nothing but the processor time of this program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.choosing import Refused, choose_session, running_sessions
from launcher.gpu_use import GpuUse
from launcher.session import is_alive, read_session
from rpruntime.progress import read_progress
from rpruntime.status import Status, read, status_path
from rpruntime.trace.spans import COPIES

PLAIN_WIDTH = 120
"""At least, where the output is no terminal."""
RATE_WINDOW_S = 0.5
"""Between two looks of `--once`, for the rates of copies."""


def top(words: list[str]) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rpctl top",
        description="What a running session does, live; ends with Ctrl-C or with the session. Utilisation, waiting and "
        "bubbles are of the last finished iteration, memory of a device is its highest in it.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the session, where there are several")
    parser.add_argument(
        "--once", action="store_true", help="print it once; also what happens where there is no terminal"
    )
    parser.add_argument("--json", action="store_true", help="the same once, for programs")
    parser.add_argument("--interval", type=float, default=0.5, metavar="S", help="seconds between two looks (0.5)")
    options = parser.parse_args(words)
    if options.interval <= 0:
        raise Refused("--interval must be above 0", 2)
    watch = Watch(choose_session(options.name, running_sessions()))
    if options.json or options.once or not sys.stdout.isatty():
        watch.look()
        time.sleep(RATE_WINDOW_S)
        found = watch.look()
        if found is None:
            raise Refused(f"session {watch.folder.name} has just ended")
        if options.json:
            print(json.dumps(found, indent=1))
        else:
            _print(found)
        return 0
    with contextlib.suppress(KeyboardInterrupt):  # that is how watching ends
        _live(watch, options.interval)
    return 0


class Watch:
    """Looks at a session again and again.

    Args:
        folder: the session's.
        clock: CLOCK_MONOTONIC in seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._copied: dict[tuple[str, int], tuple[float, tuple[int, ...]]] = {}
        self._gpus = GpuUse()

    def look(self) -> dict[str, Any] | None:
        """What there is to see, ready for JSON; None: the session has ended."""
        body = read_session(self.folder)
        if body is None or not is_alive(self.folder):
            return None
        now = self._clock()
        page = read_progress(self.folder)
        script = body.get("controller") or body["script"]
        return {
            "session": body["name"],
            "argv": script.get("argv", []),
            "script_pid": script.get("pid"),
            "log_dir": body["config"]["log_dir"],
            "page_age_s": None if page is None else max(0.0, now - page["monotonic_s"]),
            "devices": [
                self._device(role, row, page or {}, now) for role, row in body["roles"].items() if role != "optimizer"
            ],
            "optimizer": body["roles"].get("optimizer", {}).get("state"),
            "models": [] if page is None else page["models"],
            "memory": {} if page is None else page["memory"],
        }

    def _device(self, role: str, row: dict[str, Any], page: dict[str, Any], now: float) -> dict[str, Any]:
        status = read(status_path(self.folder, role, row["incarnation"])) or Status()
        figures: dict[str, Any] = next((d for d in page.get("devices", ()) if d["role"] == role), {})
        slot = next(iter(reversed(status.slots)), 0)
        task = page.get("slots", {}).get(str(slot))
        busy = figures.get("busy")
        window = max((m["bubbles"]["window_ms"] for m in page.get("models", ()) if m["bubbles"]), default=None)
        return {
            "role": role,
            "device": row["device"],
            "name": figures.get("name", ""),
            "pid": row["pid"],
            "state": row["state"],
            "incarnation": row["incarnation"],
            "stage": None if task is None else {"kind": task[0], "layers": task[1:3], "step": task[4]},
            "slot": slot,
            "phase": status.phase,
            "layer": status.layer,
            "microbatch": status.microbatch,
            "of_microbatches": None if task is None else task[3],
            "utilisation": busy,
            "waiting_ms": None if busy is None or window is None else (1 - busy) * window,
            "peak_bytes": figures.get("peak_bytes", 0),
            "memory_bytes": figures.get("memory_bytes", 0),
            "copies_bytes_per_s": self._rates(role, row["incarnation"], status, now),
            "gpu": self._gpus.of(row["pid"]) if row["pid"] and row["device"].startswith("cuda") else None,
        }

    def _rates(self, role: str, incarnation: int, status: Status, now: float) -> dict[str, float] | None:
        before = self._copied.get((role, incarnation))
        self._copied[role, incarnation] = (now, status.copied)
        if before is None or now <= before[0]:
            return None
        took = now - before[0]
        return {stream: (new - old) / took for stream, new, old in zip(COPIES, status.copied, before[1], strict=True)}


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console

    from launcher.top_screen import screen

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    console.print(screen(found))


def _live(watch: Watch, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from launcher.top_screen import screen

    found = watch.look()
    if found is None:
        raise Refused(f"session {watch.folder.name} has just ended")
    with Live(screen(found), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while found is not None:
            live.update(screen(found), refresh=True)
            time.sleep(interval_s)
            found = watch.look()
    print(f"session {watch.folder.name} has ended")
