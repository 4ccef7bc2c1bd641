"""What follows the death of a process, and what is said of it. Pure: the clock is an argument.

A device that dies more than `--max-restarts` times within ten minutes is retired, as something about it is broken; the
run goes on with the others. How it dies makes no difference, nor whether it was ready: a replacement that cannot start
is a death too.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.children import Ended
from launcher.ends import describe_place
from rpruntime.status import Status
from rpruntime.wire.messages import RoleDiedMsg

WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the next process. `num_recent` restarts of the device, this one included, were in the last ten minutes."""

    num_recent: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Do without the device: it died `num_recent` times within ten minutes."""

    num_recent: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing replaces it: the optimizer's process, whose update may be half done, one that never worked, or any at the
    session's end."""


Follows = Restart | Retire | Lost


class RestartPolicy:
    """Counts the deaths of each role.

    Args:
        max_restarts: restarts of one device within ten minutes.
        clock: seconds.
    """

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts = max_restarts
        self._clock = clock
        # When each role died, within the window.
        self._deaths: defaultdict[str, list[float]] = defaultdict(list)

    def on_death(self, role: str) -> Restart | Retire:
        """A process of this role has died."""
        now = self._clock()
        recent = [when for when in self._deaths[role] if now - when < WINDOW_S]
        self._deaths[role] = [*recent, now]
        num_recent = len(recent) + 1
        return Restart(num_recent) if num_recent <= self._max_restarts else Retire(num_recent)


class Deaths:
    """All deaths of a session that nobody asked for: what follows each, and how it is told.

    Args:
        max_restarts: restarts of one device within ten minutes.
        clock: seconds.
    """

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts = max_restarts
        self._policy = RestartPolicy(max_restarts, clock)
        self._num_restarts: Counter[str] = Counter()
        self._final: list[tuple[Ended, Retire | Lost]] = []

    def judge(self, ended: Ended) -> Follows:
        """What is to follow. One that ends its own first start is not replaced: its reason will still be there."""
        ended_itself = ended.returncode >= 0
        if not ended.device or (ended.incarnation == 1 and not ended.was_ready and ended_itself):
            return Lost()
        return self._policy.on_death(ended.role)

    def note(self, ended: Ended, follows: Follows) -> None:
        """What has followed: a replacement was started, or not."""
        if isinstance(follows, Restart):
            self._num_restarts[ended.role] += 1
        else:
            self._final.append((ended, follows))

    def line(self, ended: Ended, follows: Follows, *, others: bool) -> str:
        """What died, why, what it was doing, and what follows. `others`: other devices take work."""
        what = f"{ended.who} {'died' if ended.was_ready else 'did not start'}: {ended.reason}"
        place = describe_place(ended.status)
        if place and place not in ended.reason:
            what += f", in {place}"
        if isinstance(follows, Restart):
            return (
                f"{what}; a replacement is starting "
                f"(restart {follows.num_recent} of {self._max_restarts} in ten minutes)"
            )
        if isinstance(follows, Retire):
            goes_on = "the run goes on without it" if others else "no device is left"
            return f"{what}; {ended.device} is retired (--max-restarts), {goes_on}; log {ended.log_file}"
        if ended.was_ready and not ended.device:
            return f"{what}; its update may be half done, so the run ends"
        return what

    def messages(self) -> list[RoleDiedMsg]:
        """For a controller that attaches later: who is dead and stays so."""
        return [died_msg(ended, follows) for ended, follows in self._final]

    def rows(self) -> dict[str, dict[str, Any]]:
        """The same for `session.json`, by role."""
        return {
            ended.role: {
                "pid": ended.pid,
                "incarnation": ended.incarnation,
                "device": ended.device,
                "state": "retired" if isinstance(follows, Retire) else "ended",
                "reason": ended.reason,
            }
            for ended, follows in self._final
        }

    def restarts(self) -> list[str]:
        """Lines for the end of the session: deaths that were got over."""
        counts = sorted(self._num_restarts.items())
        return [f"{role} was restarted {'once' if count == 1 else f'{count} times'}" for role, count in counts]

    def casualties(self) -> list[str]:
        """Lines for the end of the session: deaths that were not."""
        lines = []
        for ended, follows in self._final:
            what = "was retired" if isinstance(follows, Retire) else "ended early"
            lines.append(f"{ended.who} {what}: {ended.reason}; log {ended.log_file}")
        return lines


def died_msg(ended: Ended, follows: Follows) -> RoleDiedMsg:
    """What the controller is told."""
    status = ended.status or Status()
    return RoleDiedMsg(
        role=ended.role,
        incarnation=ended.incarnation,
        pid=ended.pid or 0,
        reason=ended.reason,
        restarts=isinstance(follows, Restart),
        slots=status.slots,
        phase=status.phase,
        layer=status.layer,
        microbatch=status.microbatch,
        was_ready=ended.was_ready,
    )
