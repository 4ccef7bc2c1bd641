"""Arithmetic of an arena: which bytes of its segments are free. Pure; no memory is touched here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

ALIGNMENT = 256
"""Every extent starts at a multiple of this, so that kernels and copies see the same alignment everywhere."""


SPAN_BYTES = 64 << 30
"""No extent crosses a multiple of this: a longer segment is page-locked in several calls, and a copy must not straddle
two of them."""


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment; at least one unit, so that extents never share an address."""
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class Allocator:
    """Best-fit free lists over several segments.

    A segment serves one kind of extents: that for which it was made, or whichever takes room there first. So long
    extents find their room again, whatever short ones come between them.

    Invariant: the free runs of a segment are disjoint, sorted, never adjacent but at a span's end, and together with
    the live extents cover it exactly. `span_bytes` is for tests.
    """

    def __init__(self, span_bytes: int = SPAN_BYTES) -> None:
        self._span = span_bytes
        self._free: dict[str, list[tuple[int, int]]] = {}  # segment -> sorted (offset, nbytes)
        self._live: dict[tuple[str, int], int] = {}  # (segment, offset) -> nbytes, aligned
        self._sizes: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        """Of segments that serve one."""

    def add_segment(self, segment: str, nbytes: int, kind: str | None = None) -> None:
        """Take a new segment of `nbytes` into use. `kind` None: for whichever comes first."""
        assert segment not in self._sizes
        self._sizes[segment] = nbytes
        if kind is not None:
            self._kinds[segment] = kind
        self._free[segment] = [(start, min(self._span, nbytes - start)) for start in range(0, nbytes, self._span)]

    def add_run(self, segment: str, offset: int, nbytes: int) -> None:
        """Take aligned bytes of a segment into use of which other parts are somebody else's."""
        self._sizes[segment] = self._sizes.get(segment, 0) + nbytes
        self._free.setdefault(segment, [])
        self._live[segment, offset] = nbytes
        self.free(segment, offset)

    def claim(self, segment: str, offset: int, nbytes: int) -> None:
        """Exactly these aligned bytes, which are free, are live."""
        runs = self._free[segment]
        index = bisect_right(runs, (offset, 1 << 62)) - 1
        start, size = runs.pop(index)
        assert start <= offset and offset + nbytes <= start + size, f"{segment}+{offset} is not free"
        if start + size > offset + nbytes:
            runs.insert(index, (offset + nbytes, start + size - offset - nbytes))
        if start < offset:
            runs.insert(index, (start, offset - start))
        self._live[segment, offset] = nbytes

    def clear(self) -> None:
        """Nothing is live any more. Segments keep their kinds: as a rule the same comes again."""
        for segment, offset in list(self._live):
            self.free(segment, offset)

    @property
    def segments(self) -> set[str]:
        """The segments in use."""
        return set(self._sizes)

    def allocate(self, nbytes: int, kind: str | None = "") -> tuple[str, int] | None:
        """(segment, offset) of `nbytes` free bytes from the tightest run of this kind (None: of any), or None: no such
        run is long enough."""
        need = align(nbytes)
        best: tuple[int, str, int] | None = None
        for segment, runs in self._free.items():
            if kind is not None and self._kinds.get(segment, kind) != kind:
                continue
            for offset, size in runs:
                if size >= need and (best is None or size < best[0]):
                    best = (size, segment, offset)
                    if size == need:
                        break
        if best is None:
            return None
        size, segment, offset = best
        if kind is not None:
            self._kinds[segment] = kind
        runs = self._free[segment]
        index = bisect_left(runs, (offset, size))
        if size == need:
            del runs[index]
        else:
            runs[index] = (offset + need, size - need)
        self._live[segment, offset] = need
        return segment, offset

    def free(self, segment: str, offset: int) -> None:
        """Give an extent back; freeing what is not live is an error of ours."""
        size = self._live.pop((segment, offset), None)
        assert size is not None, f"double free of {segment}+{offset}"
        runs = self._free[segment]
        insort(runs, (offset, size))
        index = bisect_left(runs, (offset, size))
        if index + 1 < len(runs) and offset + size == runs[index + 1][0] and (offset + size) % self._span:
            size += runs.pop(index + 1)[1]
            runs[index] = (offset, size)
        if index and sum(runs[index - 1]) == offset and offset % self._span:
            runs[index - 1] = (runs[index - 1][0], runs[index - 1][1] + size)
            del runs[index]

    @property
    def live_bytes(self) -> int:
        """Bytes in live extents, alignment included."""
        return sum(self._live.values())

    @property
    def total_bytes(self) -> int:
        """Bytes in all segments."""
        return sum(self._sizes.values())

    def bytes_for(self, kind: str) -> int:
        """Bytes in segments that serve a kind, or may."""
        return sum(size for segment, size in self._sizes.items() if self._kinds.get(segment, kind) == kind)
