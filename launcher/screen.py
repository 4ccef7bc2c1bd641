"""What the launcher says: whole lines on stderr, never on stdout, which is the script's alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from launcher.devices import Device, usable_cores
from rpruntime.store.limits import HostMemory, gib, memlock_text


class Screen:
    """Lines for people."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, text: str) -> None:
        """Say something that `-q` silences."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Say something in any case. A terminal or pipe that is gone is no reason to end a run."""
        write(sys.stderr, text + "\n")


def write(stream: TextIO | None, text: str) -> OSError | None:
    """Write at once; returns what went wrong instead of raising it.

    Not through the stream's buffer: what stays there is tried again at Python's end, and makes the exit code 120.
    """
    if stream is None:  # the descriptor was closed when Python started (`2>&-`)
        return None
    try:
        try:
            fd = stream.fileno()
        except OSError:  # a replaced stream, as in tests
            stream.write(text)
            return None
        stream.flush()
        data = text.encode(stream.encoding or "utf-8", "backslashreplace")
        while data:
            data = data[os.write(fd, data) :]
    except ValueError:  # closed since
        return None
    except OSError as err:
        return err
    return None


def hold_standard_descriptors() -> None:
    """Occupy descriptors 0 to 2 where they are closed, so that no socket or pipe of ours gets their number.

    What is started gets them closed, as it would without us.
    """
    while True:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if fd > 2:
            os.close(fd)
            return


def session_line(version: str, name: str, log_dir: str) -> str:
    """The first line."""
    short = ".".join(version.split(".")[:2])
    return f"rpruntime {short}  session {name}   watch: rpctl top {name}   logs: {log_dir}/"


def devices_line(devices: tuple[Device, ...], memory: HostMemory) -> str:
    """The second line: "devices  cuda:0, cuda:1 RTX 4090 24 GB | host 251 GiB, ..."."""
    if not devices:
        text = "inline (this process)"
    else:
        text = ", ".join(device.name for device in devices)
        models = list(dict.fromkeys((device.model, device.memory_bytes) for device in devices if device.model))
        text += "".join(f" {model.removeprefix('NVIDIA ')} {size / 1e9:.0f} GB" for model, size in models)
    cgroup = f" (cgroup {gib(memory.cgroup_limit)})" if memory.cgroup_limit is not None else ""
    return (
        f"devices  {text} | host {gib(memory.ram_total)}{cgroup}, shared memory {gib(memory.shm_free)} free, "
        f"memlock {memlock_text()}, {usable_cores()} cores"
    )


START_NOTICES_S = (1.7, 3.6, 5.5, 7.4, 10.0, 20.0, 40.0)


class WaitNotice:
    """Says what is being waited for, and that it is there: for ten seconds every two, then at growing distances.

    Args:
        screen: where.
        what: goes before the roles, as "the replacement of ".
        notices_s: when it is said, in seconds of waiting; later ever again after as long as the last.
    """

    def __init__(self, screen: Screen, what: str = "", notices_s: tuple[float, ...] = START_NOTICES_S) -> None:
        self._screen = screen
        self._what = what
        self._notices_s = notices_s
        # When the present waiting began; None: nobody is waited for.
        self._began: float | None = None
        self._said = 0
        self._last: list[str] = []

    def tick(self, now: float, roles: list[str], ready: list[str]) -> None:
        """Call it often; `roles` are those not ready yet."""
        if not roles:
            there = ", ".join(role for role in self._last if role in ready)
            if self._began is not None and self._said and there:
                self._screen.say(f"{self._what}{there} started after {now - self._began:.0f} s")
            self._began, self._said = None, 0
            return
        if self._began is None:
            self._began = now
        waited = now - self._began
        if waited < self._due():
            return
        self._said += 1
        self._last = roles
        self._screen.say(f"waiting for {self._what}{', '.join(roles)} to start ({waited:.0f} s)")

    def _due(self) -> float:
        past = self._said - len(self._notices_s) + 1
        return self._notices_s[self._said] if past <= 0 else self._notices_s[-1] * (past + 1)


class LogFollower:
    """Copies what is added to log files to the screen, whole lines, each with its role."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._files: dict[str, tuple[Path, int]] = {}

    def add(self, role: str, log_file: Path) -> None:
        """Follow a file from its present end."""
        size = log_file.stat().st_size if log_file.exists() else 0
        self._files[role] = (log_file, size)

    def copy(self, *, last: bool = False) -> None:
        """Copy what is new; at the `last` call also an unfinished line."""
        for role, (path, offset) in self._files.items():
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    data = file.read(1 << 20)
            except OSError:
                continue
            end = len(data) if last else data.rfind(b"\n") + 1
            if end <= 0:
                continue
            self._files[role] = (path, offset + end)
            for line in data[:end].decode(errors="replace").splitlines():
                self._screen.warn(f"[{role}] {line}")
