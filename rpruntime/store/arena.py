"""An arena: the memory that one process allocates from, and the view of everybody's memory.

    segment "worker-0.1-3"   |extent|free|extent|extent|free...|     offsets are multiples of 256

Single writer: a process allocates only in its own arena; extents are freed when the controller says so.
Growing adds a segment, so nothing ever moves and a request fails only when the machine has no memory left.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from rpruntime.errors import HostMemoryError
from rpruntime.store.allocator import SPAN_BYTES, Allocator, align
from rpruntime.store.handle import Extent, Payload, TensorHandle
from rpruntime.store.limits import gib

log = logging.getLogger(__name__)

GROWTH_BYTES = 16 << 20
GROWTH_FRACTION = 8
MAX_GROWTH_BYTES = 256 << 20
"""A segment made for growth has at least 16 MiB and an eighth of the arena, so that segments stay few; but no more than
256 MiB that nobody has asked for."""

GRADIENTS = "gradients"
"""The kind of a worker's long extents, which lie apart from activations: else these take room in which the next stage's
gradients do not fit any more."""


POISON_VARIABLE = "RPRUNTIME_POISON"
"""Set to 1, memory is overwritten when it is released: whoever reads it afterwards computes nonsense (tests)."""

POISON = 255
"""A byte of which every floating dtype makes not-a-number."""


def poisons() -> bool:
    """Whether released memory is overwritten."""
    return os.environ.get(POISON_VARIABLE) == "1"


class Mappings(Protocol):
    """Where mappings of segments come from."""

    def open(self, segment: str) -> mmap.mmap: ...

    def forget(self, segment: str) -> None: ...


class SegmentSource(Mappings, Protocol):
    """Where segments come from: the launcher (shared memory) or this process (inline)."""

    def create(self, nbytes: int) -> tuple[str, mmap.mmap]: ...

    def release(self, segment: str) -> None: ...

    def segments_of(self, owner: str) -> list[tuple[str, int]]: ...

    def give(self, segment: str) -> None: ...


def dtype_name(dtype: torch.dtype) -> str:
    """The wire's name of a dtype, "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a wire name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Store:
    """Views of tensors in any process's segments.

    `on_map` sees each segment's bytes once (workers pin them), `on_unmap` when they are dropped.
    """

    def __init__(
        self,
        source: Mappings,
        on_map: Callable[[str, torch.Tensor], None] | None = None,
        on_unmap: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        self._source = source
        self._on_map = on_map
        self._on_unmap = on_unmap
        self._segments: dict[str, torch.Tensor] = {}

    def add(self, segment: str, mapping: mmap.mmap) -> torch.Tensor:
        """Take in a mapping that this process holds already; not if `on_map` raises."""
        with torch.inference_mode(False):  # also when the script happens to be in inference mode
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
        if self._on_map is not None:
            self._on_map(segment, memory)
        self._segments[segment] = memory
        return memory

    def forget_all(self, segments: Iterable[str]) -> None:
        """Drop segments that are not read any more; their memory goes when no process has them."""
        for name in segments:
            memory = self._segments.pop(name, None)
            if memory is not None and self._on_unmap is not None:
                self._on_unmap(name, memory)
            self._source.forget(name)

    def known(self) -> set[str]:
        """The segments that are mapped here."""
        return set(self._segments)

    def segment(self, name: str) -> torch.Tensor:
        """All bytes of a segment, uint8 [nbytes], mapped at first use."""
        memory = self._segments.get(name)
        return self.add(name, self._source.open(name)) if memory is None else memory

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """The extent's bytes, uint8 [nbytes]."""
        return self.segment(extent.segment)[extent.offset : extent.offset + extent.nbytes]

    def skeleton(self, payload: Payload) -> bytes:
        """A payload's skeleton, wherever it lies."""
        if isinstance(payload.skeleton, TensorHandle):
            return bytes(self.tensor(payload.skeleton).numpy())
        return payload.skeleton

    def tensor(self, handle: TensorHandle) -> torch.Tensor:
        """The tensor that a handle names: a live view of shared memory, not a copy."""
        return view(self.bytes_of(handle.extent), handle.offset, handle.shape, handle.dtype, handle.stride)


def view(
    memory: torch.Tensor, offset: int, shape: Iterable[int], dtype: str, stride: Iterable[int] | None = None
) -> torch.Tensor:
    """A tensor over bytes: `offset` in bytes into `memory` (uint8), `stride` in elements (default contiguous)."""
    shape = tuple(shape)
    typed = dtype_of(dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=typed, device=memory.device)
    if stride is None:
        stride = contiguous_stride(shape)
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    flat = memory[offset : offset + span * typed.itemsize].view(typed)
    return flat.as_strided(shape, tuple(stride))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor."""
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * max(1, shape[axis + 1])
    return tuple(stride)


class Arena:
    """This process's own memory: extents for what it writes."""

    def __init__(self, owner: str, source: SegmentSource, store: Store) -> None:
        self.owner = owner
        self.store = store
        self._source = source
        self._allocator = Allocator()
        self._poisons = poisons()
        self._lock = threading.RLock()  # the script allocates while the client's receiver frees
        self._noted: list[Extent] | None = None
        """What has been allocated since a block of `all_or_nothing` began."""

    def reserve(self, nbytes: int, kind: str | None = None) -> None:
        """Make one segment of exactly `nbytes` now, for a kind of extents or for what comes first. Raises
        HostMemoryError with the machine's figures."""
        with self._lock:
            self._grow(nbytes, kind)

    def adopt(self, owner: str, limit_bytes: int) -> tuple[str, ...]:
        """Take over the segments of a dead process, in which nothing is read any more, as long as this arena stays
        within `limit_bytes` or what that one had; the others are given up. Returns those: every process has to drop its
        mapping."""
        given_up = []
        with self._lock:
            found = self._source.segments_of(owner)
            limit = max(limit_bytes, sum(nbytes for _, nbytes in found))
            for name, nbytes in found:
                if self.total_bytes + nbytes <= limit:
                    log.info("arena %s adopts %s, %.1f MiB", self.owner, name, nbytes / 2**20)
                    self.store.segment(name)
                    self._source.give(name)
                    self._allocator.add_segment(name, nbytes)
                else:
                    given_up.append(name)
        self.store.forget_all(given_up)
        for name in given_up:
            self._source.release(name)
        return tuple(given_up)

    def take(self, extent: Extent, *, live: bool = False) -> None:
        """Bytes that another process had lent are this arena's from now on, and free unless `live`."""
        with self._lock:
            self.store.segment(extent.segment)
            self._allocator.add_run(extent.segment, extent.offset, align(extent.nbytes))
            if live:
                self._allocator.claim(extent.segment, extent.offset, align(extent.nbytes))

    def settle(self) -> None:
        """Processes whose memory this arena has taken over, or read, have gone: its segments are its own by name too,
        and all others are forgotten."""
        with self._lock:
            mine = self._allocator.segments
            for name in mine:
                self._source.give(name)
            self.store.forget_all(self.store.known() - mine)

    def clear(self) -> None:
        """Everything is free again, and nothing of other processes is looked at any more."""
        with self._lock:
            self._allocator.clear()
            self.settle()

    def allocate(self, nbytes: int, kind: str = "") -> Extent:
        """An extent of `nbytes` among those of its kind; the arena grows if it must. Raises HostMemoryError."""
        if nbytes > SPAN_BYTES:
            raise HostMemoryError(
                f"{gib(nbytes)} in one piece: {gib(SPAN_BYTES)} is the most that is page-locked at once; "
                "cut the layer or the tensor into smaller ones"
            )
        with self._lock:
            place = self._allocator.allocate(nbytes, kind)
            if place is None:
                place = self._place_in_more(nbytes, kind)
            extent = Extent(self.owner, *place, nbytes)
            if self._noted is not None:
                self._noted.append(extent)
        return extent

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the block raises, everything that was allocated in it, and not freed, is freed. Only for arenas that one
        thread uses."""
        before, self._noted = self._noted, []
        try:
            yield
        except BaseException:
            noted, self._noted = self._noted, []
            self.free_all(noted)
            raise
        finally:
            self._noted = None if before is None else [*before, *self._noted]

    def allocate_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> TensorHandle:
        """Room for a contiguous tensor, alone in its extent."""
        count = 1
        for size in shape:
            count *= size
        extent = self.allocate(count * dtype.itemsize)
        return TensorHandle(extent, 0, shape, contiguous_stride(shape), dtype_name(dtype))

    def put_bytes(self, data: bytes) -> TensorHandle:
        """A copy of bytes, as uint8 [n]. Raises HostMemoryError."""
        handle = self.allocate_tensor((len(data),), torch.uint8)
        if data:
            self.store.tensor(handle).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return handle

    def free(self, extent: Extent) -> None:
        """Take an extent back."""
        assert extent.owner == self.owner, f"{extent} is not of {self.owner}"
        with self._lock:
            if self._poisons:
                self.store.bytes_of(extent).fill_(POISON)
            self._allocator.free(extent.segment, extent.offset)
            if self._noted and extent in self._noted:
                self._noted.remove(extent)

    def free_all(self, extents: Iterable[Extent]) -> None:
        """Take several extents back."""
        for extent in extents:
            self.free(extent)

    @property
    def live_bytes(self) -> int:
        """Bytes in use."""
        return self._allocator.live_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes held from the machine."""
        return self._allocator.total_bytes

    def bytes_for(self, kind: str) -> int:
        """Those of them in which extents of a kind may lie."""
        return self._allocator.bytes_for(kind)

    def _place_in_more(self, nbytes: int, kind: str) -> tuple[str, int]:
        """In new memory; among extents of other kinds where the machine has none."""
        try:
            self._grow_for(align(nbytes), kind)
        except HostMemoryError:
            place = self._allocator.allocate(nbytes, None)
            if place is None:
                raise
            return place
        place = self._allocator.allocate(nbytes, kind)
        assert place is not None
        return place

    def _grow_for(self, nbytes: int, kind: str) -> None:
        """Grow by a large segment, or by a smaller one that still has the room if the machine has no more."""
        enough = max(nbytes, GROWTH_BYTES)
        roomy = max(enough, min(self._allocator.total_bytes // GROWTH_FRACTION, MAX_GROWTH_BYTES))
        if roomy > enough:
            with contextlib.suppress(HostMemoryError):
                self._grow(roomy, kind)
                return
        self._grow(enough, kind)

    def _grow(self, nbytes: int, kind: str | None) -> None:
        name, mapping = self._source.create(align(nbytes))
        try:
            self.store.add(name, mapping)
        except BaseException:
            self._source.release(name)
            raise
        self._allocator.add_segment(name, align(nbytes), kind)
        log.info("arena %s grew by %.1f MiB to %.1f", self.owner, nbytes / 2**20, self.total_bytes / 2**20)
