"""Runs rplaunch (or a script under plain python) with fake children, for the launcher's tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpruntime.store.limits import cgroup_folders
from tests.leaks import Watch, wait_until

ROOT = Path(__file__).resolve().parent.parent
FAKE_CHILD = f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'child.py'}"
LAUNCH = [sys.executable, "-m", "launcher"]
WAIT_READY = "import rpruntime.session as s\nsession = s.current()\nsession.wait_ready()\n"
"""First lines of a script that wants its session."""


class Run:
    """One run in a process group of its own; `kill_group` is what a terminal's Ctrl-C does."""

    def __init__(self, folder: Path, watch: Watch, command: list[str], **environ: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.watch = watch
        self._out = folder / "out"
        self._err = folder / "err"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RPRUNTIME_", "FAKE_"))}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(
                command,
                cwd=folder,
                env={
                    **inherited,
                    "PYTHONPATH": str(ROOT),
                    "RPRUNTIME_CHILD_COMMAND": FAKE_CHILD,
                    "RPRUNTIME_DEVICES": "cpu:2",
                    **watch.environ,
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        watch.started.append(self.popen)
        self._folder: Path | None = None

    @property
    def out(self) -> str:
        """What the script printed so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What everybody said on stderr so far."""
        return self._err.read_text()

    def wait_for(self, text: str, within_s: float = 15.0) -> None:
        """Wait until the script has printed something."""
        wait_until(lambda: text in self.out, within_s, f"{text!r} in {self.out!r}, stderr {self.err!r}")

    @property
    def folder(self) -> Path:
        """The session's folder, from the first line."""
        if self._folder is None:
            wait_until(lambda: "logs: " in self.err, 15.0, f"first line in {self.err!r}")
            found = re.search(r"session (\S+) ", self.err)
            assert found is not None
            self._folder = Path(f"/tmp/rpruntime-{os.getuid()}") / found.group(1)
            self.watch.folders.add(self._folder)
        return self._folder

    def session(self) -> dict[str, Any]:
        """session.json."""
        body: dict[str, Any] = json.loads((self.folder / "session.json").read_text())
        self.watch.launchers.add(body["launcher"]["pid"])
        return body

    def wait_children(self) -> dict[str, int]:
        """Wait until all children are ready; their pids by role."""

        def states() -> dict[str, dict[str, Any]]:
            with contextlib.suppress(OSError):
                roles: dict[str, dict[str, Any]] = self.session()["roles"]
                return roles
            return {}

        wait_until(
            lambda: states() and all(row["state"] == "ready" for row in states().values()),
            15.0,
            f"ready: {self.err}",
        )
        return {role: int(row["pid"]) for role, row in states().items()}

    def script_pid(self) -> int:
        """The script's pid, once it is known."""
        wait_until(lambda: self.session()["script"].get("pid"), 10.0, "the script's pid")
        return int(self.session()["script"]["pid"])

    def kill_group(self, number: signal.Signals) -> None:
        """Send a signal to the foreground group: launcher and script."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def wait(self, within_s: float = 20.0) -> int:
        """Exit code, as a shell shows it."""
        try:
            code = self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise AssertionError(f"still running after {within_s} s; stdout {self.out!r} stderr {self.err!r}") from None
        return code if code >= 0 else 128 - code


def rplaunch(
    tmp_path: Path, watch: Watch, script: str, *words: str, flags: tuple[str, ...] = (), **environ: str
) -> Run:
    """Start `rplaunch flags script words`."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    tmp_path.mkdir(parents=True, exist_ok=True)
    file = tmp_path / "train.py"
    file.write_text(script)
    return Run(tmp_path, watch, [*LAUNCH, *flags, str(file), *words], **environ)


def plain_python(tmp_path: Path, watch: Watch, script: str, *words: str, **environ: str) -> Run:
    """Start `python script words`."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    tmp_path.mkdir(parents=True, exist_ok=True)
    file = tmp_path / "train.py"
    file.write_text(script)
    return Run(tmp_path, watch, [sys.executable, str(file), *words], **environ)


@contextlib.contextmanager
def small_cgroup(name: str, limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup with a limit, where we may make one; else the test is skipped."""
    for parent, is_v2 in reversed(cgroup_folders()):
        file = "memory.max" if is_v2 else "memory.limit_in_bytes"
        folder = parent / name
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            continue
        try:
            (folder / file).write_text(str(limit_bytes))
        except OSError:
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            wait_until(lambda: not (folder / "cgroup.procs").read_text(), 10.0, "cgroup is empty")  # noqa: B023
            folder.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")
