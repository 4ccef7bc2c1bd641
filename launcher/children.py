"""Children of the launcher as values: what can be done with one is in its type.

RequestedProc  the fork server was asked for it; there is no process yet
UnreadyProc    starts; cannot be given work
ReadyProc      takes work
Ended          is gone, and why
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.devices import Device
from rpruntime.status import Status


class Process(Protocol):
    """What `subprocess.Popen` and `ForkedProcess` have in common; exit codes are negative for a signal."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Child:
    """A role's present incarnation. Its log began at byte `log_start`; what is before is its predecessor's."""

    role: str
    incarnation: int
    device: Device | None
    log_file: Path
    log_start: int

    @property
    def device_name(self) -> str:
        """Its device's name, "" for the optimizer."""
        return self.device.name if self.device is not None else ""

    @property
    def who(self) -> str:
        """For lines on the screen."""
        return _who(self.role, self.device_name, None)


@dataclass(frozen=True, slots=True)
class RequestedProc(_Child):
    """A child that the fork server was asked for, or will be when it is ready."""


@dataclass(frozen=True, slots=True)
class _Running(_Child):
    process: Process

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    @property
    def who(self) -> str:
        """For lines on the screen."""
        return _who(self.role, self.device_name, self.pid)


@dataclass(frozen=True, slots=True)
class UnreadyProc(_Running):
    """A child that cannot be given work yet."""


@dataclass(frozen=True, slots=True)
class ReadyProc(_Running):
    """A child that takes work."""

    info: dict[str, Any]
    """`ReadyMsg.info`, with its incarnation."""


Proc = RequestedProc | UnreadyProc | ReadyProc


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child, as the kernel reported it.

    `pid`: None for one that the fork server was to fork and did not. `lines` are the last ones of its log, `status` is
    what a worker was doing.
    """

    role: str
    incarnation: int
    pid: int | None
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


def _who(role: str, device: str, pid: int | None) -> str:
    on = f" on {device}" if device else ""
    return f"{role}{on}" + (f" (pid {pid})" if pid is not None else "")
