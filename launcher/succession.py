"""Who controls the session, and what has to happen between one controller and the next (docs/client.md).

    clean --attach--> held --death, detach--> settling --settled--> resetting --all answered--> clean

Pure: the clock is an argument. The launcher asks what to do and does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rpruntime.status import Status

STUCK_S = 2.0
"""A sealed step whose gradients do not come while no process has anything to do is given up after so long."""
RESET_TIMEOUT_S = 30.0
"""A worker that has not let go of its work by then is killed."""


@dataclass(frozen=True)
class Holder:
    """The controller that is attached."""

    incarnation: int
    pid: int
    start_time: int
    argv: tuple[str, ...]
    since: float
    """Seconds since the epoch."""


@dataclass
class Succession:
    """The controller's place. `known`: the incarnations that all processes have been told of."""

    clock: Callable[[], float] = time.monotonic
    holder: Holder | None = None
    floor: int = 1
    """The lowest number that the next controller can have."""
    phase: str = "clean"
    known: dict[str, int] = field(default_factory=dict)
    retired: tuple[str, ...] = ()
    waits_for: set[str] = field(default_factory=set)
    """Roles that have not answered the reset."""
    _quiet: tuple[float, object] = (0.0, None)
    _deadline: float = 0.0
    _optimizer_told: bool = False

    def attach(self, holder: Holder) -> None:
        """The place is taken."""
        assert self.phase == "clean" and self.holder is None
        self.holder = holder
        self.floor = holder.incarnation

    def leave(self) -> Holder:
        """The controller has gone: what it sealed is to be finished."""
        assert self.holder is not None
        left, self.holder = self.holder, None
        self.floor = left.incarnation + 1
        self.phase = "settling"
        self._quiet = (self.clock(), None)
        return left

    def is_stuck(self, statuses: Iterable[Status | None]) -> bool:
        """Whether workers and optimizer have stood still for a while, so that nothing more will come.

        Workers that wait for weights are still too: those come from a step that the optimizer is busy with.
        """
        seen = tuple((None if s is None else (s.busy, s.progress)) for s in statuses)
        now = self.clock()
        if seen != self._quiet[1] or any(s is not None and s[0] for s in seen):
            self._quiet = (now, seen)
        return now - self._quiet[0] >= STUCK_S

    def begin_reset(self, ready: Iterable[str], incarnations: Mapping[str, int], retired: Iterable[str]) -> None:
        """All ready roles are told to reset."""
        self.phase = "resetting"
        self.waits_for = set(ready)
        self._optimizer_told = False
        self.known = dict(incarnations)
        self.retired = tuple(retired)
        self._deadline = self.clock() + RESET_TIMEOUT_S

    def is_optimizers_turn(self) -> bool:
        """Whether all workers have reset and the optimizer has not been told; it is told now."""
        if self.phase != "resetting" or self.waits_for != {"optimizer"} or self._optimizer_told:
            return False
        self._optimizer_told = True
        return True

    def overdue(self) -> list[str]:
        """Workers that have not let go of their work in time."""
        if self.phase != "resetting" or self.clock() < self._deadline:
            return []
        return sorted(self.waits_for - {"optimizer"})

    def answered(self, role: str) -> bool:
        """A role has reset, or is no more; True: it was the last one."""
        self.waits_for.discard(role)
        if self.phase != "resetting" or self.waits_for:
            return False
        self.phase = "clean"
        return True
