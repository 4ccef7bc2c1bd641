"""Slabs before there is a pipe: the script's own shared memory for weights, lent to a model when it is loaded.

    free --lend--> lent --take_back--> free        the pipe is closed, the weights are still these
                    |
                    +----give_up--> gone           the optimizer has written newer ones; the bytes are its own now

A slab is a segment of its own, so that one that no other process has mapped can be given back to the machine.
Parameters that are views of a slab stay readable in every state: a mapping lives as long as somebody views it.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rpruntime.errors import SessionLost
from rpruntime.store.arena import SegmentSource, dtype_name
from rpruntime.store.handle import Extent
from rpruntime.wire.messages import UnitSpec


@dataclass
class Slab:
    """One segment.

    Attributes:
        segment: its name.
        memory: its bytes, uint8 [nbytes].
        taken: (start, stop) of what is lent or gone.
    """

    segment: str
    memory: torch.Tensor
    taken: set[tuple[int, int]] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    """Where those ranges start that are not ours any more."""
    shared: bool = False
    """Whether another process may have mapped it."""

    @property
    def address(self) -> int:
        """Of its first byte in this process."""
        return self.memory.data_ptr()


class Slabs:
    """All slabs of one session. `forget(segment)` is told of every segment that is given back."""

    def __init__(self, owner: str, source: SegmentSource, forget: Callable[[str], None]) -> None:
        self._owner = owner
        self._source = source
        self._forget = forget
        self._slabs: dict[str, Slab] = {}
        self._addresses: list[tuple[int, str]] = []
        """Sorted."""
        self._dropped: deque[str] = deque()
        """Of models that are gone: a finalizer may run at any moment, so it only leaves a note."""

    def make(self, nbytes: int) -> Slab:
        """A new slab. Raises HostMemoryError with the machine's figures."""
        self._release_dropped()
        segment, mapping = self._source.create(max(1, nbytes))
        with torch.inference_mode(False):
            slab = Slab(segment, torch.frombuffer(mapping, dtype=torch.uint8))
        self._slabs[segment] = slab
        insort(self._addresses, (slab.address, segment))
        return slab

    def keep_for(self, model: Any, slabs: Iterable[Slab]) -> None:
        """Give these slabs back when `model` is gone, those that no pipe has borrowed."""
        for slab in slabs:
            weakref.finalize(model, self._dropped.append, slab.segment).atexit = False

    def lend(self, unit: UnitSpec, parameters: Sequence[torch.Tensor]) -> Extent | None:
        """The extent in which a unit's parameters lie already just as its slab would have them, or None."""
        first = next((p for p in parameters if p.numel()), None)
        if first is None:
            return None
        offset = next(spec.offset for spec, p in zip(unit.params, parameters, strict=True) if p.numel())
        start = first.data_ptr() - offset
        slab = self._at(start)
        if slab is None or start + unit.nbytes > slab.address + slab.memory.numel():
            return None
        for spec, parameter in zip(unit.params, parameters, strict=True):
            same = dtype_name(parameter.dtype) == spec.dtype and tuple(parameter.shape) == spec.shape
            here = parameter.data_ptr() == start + spec.offset or not parameter.numel()
            if not (same and here and parameter.is_contiguous()):
                return None
        begin, end = start - slab.address, start - slab.address + unit.nbytes
        if any(begin < stop and other < end for other, stop in slab.taken):
            return None
        slab.taken.add((begin, end))
        slab.shared = True
        return Extent(self._owner, slab.segment, begin, unit.nbytes)

    def memory(self, extent: Extent) -> torch.Tensor:
        """The bytes of a lent extent, uint8 [nbytes], writable."""
        return self._slabs[extent.segment].memory[extent.offset : extent.offset + extent.nbytes]

    def take_back(self, extent: Extent) -> None:
        """The loan is over and the bytes are what they were."""
        self._slabs[extent.segment].taken.discard((extent.offset, extent.offset + extent.nbytes))

    def note_freed(self, extents: Iterable[Extent]) -> None:
        """Who borrowed these, if they are of a slab, has been told that nobody reads them any more."""
        for extent in extents:
            slab = self._slabs.get(extent.segment)
            if slab is not None and (extent.offset, extent.offset + extent.nbytes) in slab.taken:
                slab.gone.add(extent.offset)

    def is_gone(self, extent: Extent) -> bool:
        """Whether lent bytes belong to who borrowed them."""
        slab = self._slabs.get(extent.segment)
        return slab is None or extent.offset in slab.gone

    def give_up(self, extent: Extent) -> None:
        """The bytes belong to who borrowed them; the slab is forgotten when nothing of it is left."""
        slab = self._slabs[extent.segment]
        slab.gone.add(extent.offset)
        if sum(stop - start for start, stop in slab.taken if start in slab.gone) == slab.memory.numel():
            self._drop(slab)

    def slabs_of(self, parameters: Iterable[torch.Tensor]) -> list[Slab]:
        """The slabs in which any of these lie, each once."""
        found = {slab.segment: slab for p in parameters if p.numel() and (slab := self._at(p.data_ptr())) is not None}
        return list(found.values())

    def release(self, slabs: Iterable[Slab]) -> None:
        """Give back those that were never lent: no parameter is there any more, but somebody may view them still."""
        for slab in slabs:
            if not slab.shared and slab.segment in self._slabs:
                self._drop(slab)
                self._forget(slab.segment)
                with contextlib.suppress(SessionLost):
                    self._source.release(slab.segment)

    @property
    def live_bytes(self) -> int:
        """Bytes of all slabs that are known here."""
        self._release_dropped()
        return sum(slab.memory.numel() for slab in self._slabs.values())

    def _drop(self, slab: Slab) -> None:
        del self._slabs[slab.segment]
        self._addresses.remove((slab.address, slab.segment))

    def _release_dropped(self) -> None:
        while self._dropped:
            slab = self._slabs.get(self._dropped.popleft())
            if slab is not None:
                self.release([slab])

    def _at(self, address: int) -> Slab | None:
        index = bisect_right(self._addresses, (address, chr(0x10FFFF))) - 1
        if index < 0:
            return None
        slab = self._slabs[self._addresses[index][1]]
        return slab if address < slab.address + slab.memory.numel() else None
