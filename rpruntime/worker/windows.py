"""Which bytes of a stage's weights or gradients cross the link with which micro-batch (paper section 4.2).

A stage of M micro-batches makes M windows. While it computes, the next stage's weights come up and the last stage's
gradients go down, cut into pieces and spread over the windows by longest processing time first, so that no window is
much longer than another and no activation waits for more than the rest of one piece. Small stages use fewer windows:
what is early hurts nobody.

    window    0               1               2
    up        act 1, pieces   act 2, pieces   act 3, pieces
    down      pieces          act 0, pieces   act 1, pieces
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PIECE_BYTES = 16 << 20
"""The smallest copy that runs at the full rate of a PCIe 5 link (docs/performance.md)."""

WINDOW_BYTES = 1 << 30
"""A window takes this much before another one is used: gradients that are spread too thinly hold up the optimizer."""


@dataclass(frozen=True)
class WindowSizes:
    """Where copies are cut, and what a window takes before another one is used."""

    piece_bytes: int = PIECE_BYTES
    window_bytes: int = WINDOW_BYTES


USUAL_SIZES = WindowSizes()


class PiecewiseCopy(Protocol):
    """A copy of bytes whose pieces are started one by one."""

    nbytes: int

    def start(self, first: int, stop: int) -> None:
        """Start copying bytes [first, stop); each byte once."""
        ...


def cut(nbytes: int, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """[first, stop) of pieces of at most `piece_bytes` that cover `nbytes` in order."""
    return [(first, min(first + piece_bytes, nbytes)) for first in range(0, nbytes, piece_bytes)]


def longest_first(sizes: Sequence[int], num_windows: int) -> list[list[int]]:
    """Indices of `sizes` by window: the largest goes to the window that has least so far. Ascending in each window."""
    windows: list[list[int]] = [[] for _ in range(num_windows)]
    loads = [(0, window) for window in range(num_windows)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, window = heapq.heappop(loads)
        windows[window].append(index)
        heapq.heappush(loads, (load + sizes[index], window))
    return [sorted(window) for window in windows]


class Windows:
    """Copies spread over windows.

    Args:
        copies: none of them started.
        num_windows: how many `open` calls are expected at most, this one included; the first window opens now.
        sizes: of pieces and windows.
    """

    def __init__(self, copies: Sequence[PiecewiseCopy], num_windows: int, sizes: WindowSizes = USUAL_SIZES) -> None:
        pieces = [(copy, *piece) for copy in copies for piece in cut(copy.nbytes, sizes.piece_bytes)]
        wanted = -(-sum(copy.nbytes for copy in copies) // sizes.window_bytes)
        spread = longest_first([stop - first for _, first, stop in pieces], max(1, min(num_windows, wanted)))
        self._windows = deque([pieces[index] for index in window] for window in spread)
        self.open()

    def open(self) -> None:
        """Start what belongs to the next window."""
        if self._windows:
            self._start(self._windows.popleft())

    def finish(self) -> None:
        """Start all that is left."""
        while self._windows:
            self.open()

    @staticmethod
    def _start(pieces: Sequence[tuple[PiecewiseCopy, int, int]]) -> None:
        for copy, first, stop in pieces:
            copy.start(first, stop)
