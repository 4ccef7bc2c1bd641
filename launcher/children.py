"""Children of the launcher as values: what can be done with one is in its type.

UnreadyProc    starts; cannot be given work
ReadyProc      takes work
Ended          is gone, and why
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.devices import Device
from rpruntime.status import Status


@dataclass(frozen=True, slots=True)
class _Child:
    """A process that runs. Its log began at byte `log_start`; what is before is its predecessor's."""

    role: str
    incarnation: int
    device: Device | None
    popen: subprocess.Popen[bytes]
    log_file: Path
    log_start: int

    @property
    def device_name(self) -> str:
        """Its device's name, "" for the optimizer."""
        return self.device.name if self.device is not None else ""

    @property
    def who(self) -> str:
        """For lines on the screen."""
        return _who(self.role, self.device_name, self.popen.pid)


@dataclass(frozen=True, slots=True)
class UnreadyProc(_Child):
    """A child that cannot be given work yet."""


@dataclass(frozen=True, slots=True)
class ReadyProc(_Child):
    """A child that takes work."""

    info: dict[str, Any]
    """`ReadyMsg.info`, with its incarnation."""


Proc = UnreadyProc | ReadyProc


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child, as the kernel reported it.

    `lines` are the last ones of its log, `status` is what a worker was doing.
    """

    role: str
    incarnation: int
    pid: int
    device: str
    returncode: int
    reason: str
    was_ready: bool
    expected: bool
    log_file: Path
    lines: tuple[str, ...]
    status: Status | None

    @property
    def who(self) -> str:
        """For lines on the screen."""
        return _who(self.role, self.device, self.pid)


def _who(role: str, device: str, pid: int) -> str:
    on = f" on {device}" if device else ""
    return f"{role}{on} (pid {pid})"
