"""A worker's status page: what it is doing, for its launcher to read, also when the worker is dead.

The optimizer has one too, of which only `heartbeat`, `busy` and `progress` are used.

    FOLDER/ROLE.INCARNATION.status     4 KiB, 0600, mapped by the worker, read by the launcher

    byte  0  heartbeat    CLOCK_MONOTONIC, ns; a thread of the worker's writes it twice a second
          8  busy         1: it has work on its hands beside the slots below
         16  progress     counts whatever happens
         24  finishing    the oldest slot that is launched and not finished on the device; 0: none
         32  slot         the slot that is being launched; 0: none
         40  layer        where in it the user's code is; -1: in no layer
         48  microbatch   -1: none
         56  phase        24 bytes of UTF-8, zeros at its end: "forward", "recompute", "backward", "loss"...
         80  copied       four words: bytes of weights up, activations up, activations down, gradients down so far

All words are signed 64-bit in the machine's order, each written by one aligned store. A file and not shared memory,
because it must outlive a SIGKILL and still be found by name; a page of the kernel's cache, so writing costs a store.

It is read for good only when the writer is dead: then nothing changes any more, and the worst that a death in the
middle of `at` leaves is a new slot beside the layer before. A read of a live page may mix two moments. It is used for
display, and to see whether the worker still moves: for that any change will do, whatever it shows.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PAGE_BYTES = 4096
BEAT_S = 0.5

_HEARTBEAT, _BUSY, _PROGRESS, _FINISHING, _SLOT, _LAYER, _MICROBATCH = range(7)
_PHASE_AT, _PHASE_BYTES = 56, 24
_COPIED = (_PHASE_AT + _PHASE_BYTES) // 8
_PAGE = struct.Struct(f"@7q{_PHASE_BYTES}s4q")


@dataclass(frozen=True, slots=True)
class Status:
    """A status page as it was read; see the module for the fields. `busy`: `progress` should move."""

    heartbeat_ns: int = 0
    busy: bool = False
    progress: int = 0
    finishing: int = 0
    slot: int = 0
    layer: int = -1
    microbatch: int = -1
    phase: str = ""
    copied: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that were running, the oldest first."""
        return tuple(slot for slot in dict.fromkeys((self.finishing, self.slot)) if slot > 0)


class StatusWriter(Protocol):
    """What a worker tells of itself: a `StatusPage`, or a `NullStatus` where nobody watches."""

    def beat(self) -> None: ...

    def at(self, slot: int, phase: str = "", layer: int = -1, microbatch: int = -1) -> None: ...

    def progress(self) -> None: ...

    def set_busy(self, busy: bool) -> None: ...

    def finishing(self, slot: int) -> None: ...

    def copied(self, kind: int, nbytes: int) -> None: ...


class NullStatus:
    """No page: inline sessions, whose user sees for himself what hangs."""

    def beat(self) -> None:
        """Nothing."""

    def at(self, slot: int, phase: str = "", layer: int = -1, microbatch: int = -1) -> None:
        """Nothing."""

    def progress(self) -> None:
        """Nothing."""

    def set_busy(self, busy: bool) -> None:
        """Nothing."""

    def finishing(self, slot: int) -> None:
        """Nothing."""

    def copied(self, kind: int, nbytes: int) -> None:
        """Nothing."""


class StatusPage:
    """The writer's side. `beat` is for the heartbeat thread, everything else for the thread that works."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._words = memoryview(memory).cast("q")
        self._phase = memoryview(memory)[_PHASE_AT : _PHASE_AT + _PHASE_BYTES]
        self._phases: dict[str, bytes] = {}
        self._count = 0
        self._words[_LAYER] = self._words[_MICROBATCH] = -1
        self.beat()

    @classmethod
    def create(cls, path: Path) -> StatusPage:
        """Make the page's file.

        Raises:
            OSError: it is there already, or there is no room.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)  # a full disk is an error here, not a SIGBUS later
            return cls(mmap.mmap(fd, PAGE_BYTES))
        finally:
            os.close(fd)

    def beat(self) -> None:
        """This process runs."""
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def at(self, slot: int, phase: str = "", layer: int = -1, microbatch: int = -1) -> None:
        """The user's code is about to run here; counts as progress. `at(0)`: nothing is being launched.

        A fraction of a microsecond: it is called for every layer. `at(0)` again is nothing new, so a loop may say so.
        """
        words = self._words
        if slot == 0 == words[_SLOT]:
            return
        words[_SLOT] = slot
        words[_LAYER] = layer
        words[_MICROBATCH] = microbatch
        self._phase[:] = self._phases.get(phase) or self._encoded(phase)
        self._count += 1
        words[_PROGRESS] = self._count

    def progress(self) -> None:
        """Something happened: a copy came, the device finished something."""
        self._count += 1
        self._words[_PROGRESS] = self._count

    def set_busy(self, busy: bool) -> None:
        """Whether there is work that should move; a launched slot is such work in any case.

        A change counts as progress: waiting starts anew with it.
        """
        if busy != bool(self._words[_BUSY]):
            self._words[_BUSY] = busy
            self.progress()

    def finishing(self, slot: int) -> None:
        """The oldest slot that is launched and not finished, 0 for none; a change counts as progress."""
        if slot != self._words[_FINISHING]:
            self._words[_FINISHING] = slot
            self.progress()

    def copied(self, kind: int, nbytes: int) -> None:
        """So many bytes more are copied; `kind` 0 to 3 in the order of the page."""
        self._words[_COPIED + kind] += nbytes

    @property
    def task(self) -> str:
        """What is being launched, for the lines of the log; "" for nothing."""
        words = self._words
        slot, layer = words[_SLOT], words[_LAYER]
        if not slot:
            return ""
        return f"slot {slot}" + (f" layer {layer}" if layer >= 0 else "")

    def _encoded(self, phase: str) -> bytes:
        found = phase.encode()[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
        self._phases[phase] = found
        return found


def status_path(folder: Path, role: str, incarnation: int) -> Path:
    """Where a process's page is."""
    return folder / f"{role}.{incarnation}.status"


def read(path: Path) -> Status | None:
    """A page's content; None if there is none (yet)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < PAGE_BYTES:
        return None
    heartbeat, busy, progress, finishing, slot, layer, microbatch, phase, *copied = _PAGE.unpack_from(data)
    if heartbeat == 0:  # its file is there, but nothing was written yet
        return None
    text = phase.rstrip(b"\0").decode(errors="replace")
    is_busy, (w, up, down, g) = bool(busy or slot or finishing), copied
    return Status(heartbeat, is_busy, progress, finishing, slot, layer, microbatch, text, (w, up, down, g))


def start_heartbeat(page: StatusWriter) -> threading.Thread:
    """Let a daemon thread beat until the process ends. It looks at nothing that could block, the device least of all:
    `progress` is what shows that the device moves."""

    def beat() -> None:
        while True:
            page.beat()
            time.sleep(BEAT_S)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    return thread
