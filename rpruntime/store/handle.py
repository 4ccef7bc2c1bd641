"""Names for bytes and tensors in shared memory; what crosses processes instead of the bytes themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rpruntime.wire.codec import struct

MAX_INLINE_SKELETON_BYTES = 32 << 10
"""A larger skeleton lies in its writer's arena."""


@struct
@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in a segment. `owner` is the process (role.incarnation) that allocated it and alone frees it."""

    owner: str
    segment: str
    offset: int
    nbytes: int


def by_owner(extents: Iterable[Extent]) -> dict[str, tuple[Extent, ...]]:
    """Extents by who frees them, in their order."""
    found: dict[str, list[Extent]] = {}
    for extent in extents:
        found.setdefault(extent.owner, []).append(extent)
    return {owner: tuple(theirs) for owner, theirs in found.items()}


def role_of(owner: str) -> str:
    """The role of an owner, `ROLE.INCARNATION`."""
    return owner.rpartition(".")[0]


@struct
@dataclass(frozen=True, slots=True)
class TensorHandle:
    """A tensor inside an extent: byte offset from the extent's start, shape and stride in elements, dtype by name."""

    extent: Extent
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@struct
@dataclass(frozen=True, slots=True)
class Payload:
    """A Python value with its tensors taken out: what passes between two stages.

    `skeleton` is a pickle in which tensor i is a reference; b"" is the common case of one bare tensor. A skeleton
    too large for a message lies in an arena and is named by a handle. `needs_grad[i]`: tensor i wants a gradient.
    """

    skeleton: bytes | TensorHandle
    tensors: tuple[TensorHandle, ...]
    needs_grad: tuple[bool, ...]

    def extents(self) -> tuple[Extent, ...]:
        """All extents that this value keeps alive, each once."""
        named = [tensor.extent for tensor in self.tensors]
        if isinstance(self.skeleton, TensorHandle):
            named.append(self.skeleton.extent)
        return tuple(dict.fromkeys(named))
