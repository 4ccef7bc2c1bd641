"""What the optimizer keeps of a model so that another controller can go on with it: buffers and the package.

Workers' and controllers' memory goes with them, so both are copies in the optimizer's own arena.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rpruntime.store.arena import Arena
from rpruntime.store.handle import Extent, TensorHandle
from rpruntime.store.relocate import extents_in, relocated
from rpruntime.wire.codec import pack_struct
from rpruntime.wire.messages import ModelSpec
from rpruntime.wire.succession import Buffers


def copied(value: Any, arena: Arena) -> Any:
    """A structure with all bytes that it names copied into the arena. Raises HostMemoryError."""
    moved: dict[Extent, Extent] = {}

    def move(extent: Extent) -> Extent:
        if extent not in moved:
            moved[extent] = arena.allocate(extent.nbytes)
            arena.store.bytes_of(moved[extent]).copy_(arena.store.bytes_of(extent))
        return moved[extent]

    with arena.all_or_nothing():
        return relocated(value, move)


def put_struct(value: Any, arena: Arena) -> TensorHandle:
    """A structure's packed bytes, in the arena. Raises HostMemoryError."""
    return arena.put_bytes(pack_struct(value))


class Kept:
    """Of one model."""

    def __init__(self, spec: ModelSpec, arena: Arena) -> None:
        self._arena = arena
        self._spec = spec
        self._package_extents: tuple[Extent, ...] = ()
        # What was copied last, to see that nothing has changed since, and the copy.
        self._source: Buffers = ()
        self.package: TensorHandle | None = None
        """The packed spec; None: its bytes are still the controller's."""
        self.buffers: Buffers = ()
        """Those of the newest version."""
        self.head: Buffers = ()
        """Those after the open iteration's calls."""

    def keep(self, buffers: Buffers) -> None:
        """Copy the buffers of the newest version."""
        if buffers != self._source:  # the same bytes, as the controller holds them from one step to the next
            old, self.buffers = self.buffers, copied(buffers, self._arena)
            self._arena.free_all(extents_in(old))
        self._source = buffers

    def keep_head(self, buffers: Buffers) -> None:
        """Copy the buffers after the open iteration's calls."""
        old, self.head = self.head, copied(buffers, self._arena)
        self._arena.free_all(extents_in(old))

    def take_head(self) -> None:
        """The open iteration has been stepped as it was found."""
        self._arena.free_all(extents_in(self.buffers))
        self.buffers, self.head, self._source = self.head, (), ()

    def settle(self, *, with_head: bool) -> None:
        """A controller has gone: its memory and the workers' will be used again."""
        self._source = ()
        if not with_head:
            self.keep_head(())
        if self.package is None:
            with self._arena.all_or_nothing():
                spec = copied(dataclasses.replace(self._spec, lent=()), self._arena)
                self.package = put_struct(spec, self._arena)
            self._package_extents = (*extents_in(spec), self.package.extent)

    def free(self) -> None:
        """Give everything back."""
        self._arena.free_all((*extents_in(self.buffers), *extents_in(self.head), *self._package_extents))
        self.buffers, self.head, self.package, self._package_extents = (), (), None, ()
