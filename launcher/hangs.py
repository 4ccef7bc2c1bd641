"""Whether a process still moves. `HangWatch` is pure: it is shown each process about once a second and says what to do.

    stopped    its state is T (SIGSTOP)                                            said after 10 s
    silent     nothing on its status page moves: its interpreter is stuck in C     said after 10 s
    stuck      it is busy, and only its heartbeat moves                            said after half of --hang-timeout
    starting   a replacement that is not ready             (the launcher says anyway that it waits for it)

Each of them, for --hang-timeout, is answered with SIGKILL: then it is a death like any other. An idle worker has no
progress to make and is never stuck. The optimizer's process cannot be replaced, and may well be long at one thing where
the machine swaps: stuck it is only reported.

Time is counted as seconds between two looks, at most `_MOST_S` for each. If the launcher was the one that did not run
(Ctrl-Z, a frozen container, a machine that was asleep), that is nobody else's fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launcher.ends import describe_place
from rpruntime.status import Status

Process = tuple[str, int]
"""Role and incarnation."""

LOOK_S = 1.0
SAY_S = 10.0
START_S = 60.0
"""A replacement has at least so long to become ready."""
_MOST_S = 2 * LOOK_S
# In the order in which they explain each other.
_WORDS = {
    "stopped": "was stopped (SIGSTOP?)",
    "silent": "gave no sign of life (stuck in C code?)",
    "stuck": "made no progress",
    "starting": "was not ready",
}


@dataclass(frozen=True, slots=True)
class Sighting:
    """What can be seen of a process from outside.

    `who`: its name for lines on the screen. `status`: None while it is not ready, or if it has no page. `starting`: it
    is a replacement and not ready. `replaceable`: another process can do its work; else its death ends the run.
    """

    who: str
    stopped: bool
    status: Status | None
    starting: bool = False
    replaceable: bool = True


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL it; `reason` is then why it died."""

    reason: str


@dataclass(slots=True)
class _Watched:
    """One process: how it looked, for how long each cause has held (seconds), what was said of it."""

    status: Status | None
    held_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_WORDS, 0.0))
    said: str = ""
    killed_s: float | None = None
    """How long ago it was killed."""


class HangWatch:
    """Watches processes.

    Args:
        timeout_s: --hang-timeout; 0: nobody is killed, and a busy worker may take its time.
        clock: seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._watched: dict[Process, _Watched] = {}
        self._looked = clock()

    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return self._clock() - self._looked >= LOOK_S

    def look(self, sightings: Mapping[Process, Sighting]) -> list[tuple[Process, Say | Kill]]:
        """Take in how all processes look now; returns what is to be done about which."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, _MOST_S), now
        known, self._watched = self._watched, {key: _Watched(seen.status) for key, seen in sightings.items()}
        verdicts: list[tuple[Process, Say | Kill]] = []
        for key, watched in known.items():
            if key not in sightings:
                continue
            self._watched[key] = watched
            _count(watched, sightings[key], passed)
            verdict = self._judge(watched, sightings[key], passed)
            if verdict is not None:
                verdicts.append((key, verdict))
        return verdicts

    def _judge(self, watched: _Watched, seen: Sighting, passed: float) -> Say | Kill | None:
        if watched.killed_s is not None:
            before, watched.killed_s = watched.killed_s, watched.killed_s + passed
            if before < SAY_S <= watched.killed_s:
                return Say(f"{seen.who} was killed and does not end: it hangs in the kernel, perhaps in the driver")
            return None
        for cause, held_s in watched.held_s.items():
            if held_s >= self._killed_after(cause, seen):
                watched.killed_s = 0.0
                return Kill(f"{_WORDS[cause]} for {held_s:.0f} s{_place(seen)}, so it was killed")
        if watched.said:
            if watched.held_s[watched.said] == 0:
                watched.said = ""
                return Say(f"{seen.who} goes on")
            return None
        for cause, held_s in watched.held_s.items():
            if held_s >= self._said_after(cause):
                watched.said = cause
                return Say(self._line(cause, held_s, seen))
        return None

    def _killed_after(self, cause: str, seen: Sighting) -> float:
        if not self._timeout_s or (cause == "stuck" and not seen.replaceable):
            return float("inf")
        return max(self._timeout_s, START_S) if cause == "starting" else self._timeout_s

    def _said_after(self, cause: str) -> float:
        if cause == "starting":
            return float("inf")
        half = self._timeout_s / 2 if self._timeout_s else float("inf")
        return half if cause == "stuck" else min(SAY_S, half)

    def _line(self, cause: str, held_s: float, seen: Sighting) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - held_s))
        end = ""
        if self._timeout_s and cause == "stuck" and not seen.replaceable:
            end = "; the run waits for it"
        elif self._timeout_s:
            end = f"; it will be killed after {self._timeout_s:g} s (--hang-timeout)"
            end += "" if seen.replaceable else ", and the run ends with it"
        return f"{seen.who} {_WORDS[cause]} for {held_s:.0f} s, since {since}{_place(seen)}{end}"


def _count(watched: _Watched, seen: Sighting, passed: float) -> None:
    """Add the time that has passed to every cause that holds, and forget it for the others."""
    before, watched.status = watched.status, seen.status
    held_s = watched.held_s
    held_s["stopped"] = held_s["stopped"] + passed if seen.stopped else 0.0
    if seen.stopped:  # the rest stands still with it
        return
    holds = {"silent": False, "stuck": False, "starting": seen.starting}
    if before is not None and seen.status is not None and before.progress == seen.status.progress:
        holds["stuck"] = seen.status.busy
        holds["silent"] = before.heartbeat_ns == seen.status.heartbeat_ns
    for cause, held in holds.items():
        held_s[cause] = held_s[cause] + passed if held else 0.0


def _place(seen: Sighting) -> str:
    place = describe_place(seen.status) if seen.status is not None and seen.status.busy else ""
    return f" (it was in {place})" if place else ""
