"""Copies of units on their way to the controller, and values on their way back into units.

A row is (parameter index, name, tensor). Name "" is the fp32 weight, "-1" the master copy of one version before, any
other the optimizer's state. Messages have a limit, so a unit of many parameters is told in parts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from rpruntime.optimizer.units import Unit
from rpruntime.store.allocator import align
from rpruntime.store.arena import Arena, contiguous_stride, dtype_name
from rpruntime.store.handle import MAX_INLINE_SKELETON_BYTES, Extent, Payload, TensorHandle
from rpruntime.wire.messages import RestoreUnitMsg, StateMsg

WEIGHT = ""
PREVIOUS = "-1"
GROUP = "/group"
"""Name of a value: the hyper-parameters of the group that the parameter is in."""
ROWS_A_MESSAGE = 1000

Row = tuple[int, int, str, Any]
"""(unit, parameter index, name, value)"""


def parts_of(rows: list[Row], allocate: Callable[[int], Extent], arena: Arena) -> Iterator[dict[str, Any]]:
    """The fields `rows`, `payload` and `last` of the `StateMsg`s that carry these values.

    Tensors are copied into one extent of `allocate(bytes)` a message.
    """
    starts = range(0, max(1, len(rows)), ROWS_A_MESSAGE)
    for start in starts:
        chunk = rows[start : start + ROWS_A_MESSAGE]
        tensors = [(*place, value.detach()) for *place, value in chunk if _is_dense(value)]
        values = {tuple(place): value for *place, value in chunk if not _is_dense(value)}
        body = cloudpickle.dumps(values) if values else b""
        if len(body) > MAX_INLINE_SKELETON_BYTES:
            tensors.append((-1, -1, "payload", torch.frombuffer(bytearray(body), dtype=torch.uint8)))
        handles = []
        if tensors:
            extent = allocate(sum(align(tensor.nbytes) for *_, tensor in tensors))
            offset = 0
            for *place, tensor in tensors:
                shape = tuple(tensor.shape)
                handle = TensorHandle(extent, offset, shape, contiguous_stride(shape), dtype_name(tensor.dtype))
                arena.store.tensor(handle).copy_(tensor)
                offset += align(tensor.nbytes)
                handles.append((*place, handle))
        payload = Payload(body, (), ()) if body else None
        if len(body) > MAX_INLINE_SKELETON_BYTES:
            payload = Payload(handles.pop()[3], (), ())
        yield {"rows": tuple(handles), "payload": payload, "last": start == starts[-1]}


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class Copies:
    """The copies of one model's units that are not written yet."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._extents: dict[tuple[int, int], list[Extent]] = {}

    def copy(self, model: int, save: int, unit: Unit) -> tuple[list[StateMsg], int]:
        """Copy a unit's weights, state and groups; returns the messages and the bytes. Raises HostMemoryError."""
        number = unit.spec.index
        extents = self._extents.setdefault((save, number), [])

        def allocate(nbytes: int) -> Extent:
            extents.append(self._arena.allocate(nbytes))
            return extents[-1]

        rows: list[Row] = [(number, index, WEIGHT, param) for index, param in enumerate(unit.params)]
        rows += [(number, *row) for row in unit.state_rows()]
        rows += [(number, index, GROUP, group) for index, group in unit.group_rows()]
        messages = [
            StateMsg(model, save, "snapshot", unit=number, **fields) for fields in parts_of(rows, allocate, self._arena)
        ]
        return messages, sum(extent.nbytes for extent in extents)

    def free(self, save: int, unit: int | None = None) -> None:
        """Give a unit's copy back, or all copies of a save."""
        for key in [key for key in self._extents if key[0] == save and unit in (None, key[1])]:
            self._arena.free_all(self._extents.pop(key))

    def free_all(self) -> None:
        """Give everything back."""
        for save, _ in list(self._extents):
            self.free(save)


@dataclass
class Incoming:
    """The values of one unit, while their parts come in."""

    rows: dict[tuple[int, str], TensorHandle] = field(default_factory=dict)
    values: dict[tuple[int, str], Any] = field(default_factory=dict)

    def add(self, msg: RestoreUnitMsg, arena: Arena) -> None:
        """Take in a part."""
        self.rows.update({(index, name): handle for index, name, handle in msg.rows})
        if msg.payload is not None:
            self.values.update(pickle.loads(arena.store.skeleton(msg.payload)))

    def named(self, arena: Arena, name: str) -> dict[int, torch.Tensor]:
        """Parameter index -> tensor of this name."""
        return {index: arena.store.tensor(handle) for (index, n), handle in self.rows.items() if n == name}

    def state(self, arena: Arena) -> dict[int, dict[str, Any]]:
        """Parameter index -> its optimizer state."""
        found: dict[int, dict[str, Any]] = {}
        for (index, name), handle in self.rows.items():
            if name not in (WEIGHT, PREVIOUS):
                found.setdefault(index, {})[name] = arena.store.tensor(handle)
        for (index, name), value in self.values.items():
            if name != GROUP:
                found.setdefault(index, {})[name] = value
        return found

    def groups(self) -> dict[int, dict[str, Any]]:
        """Parameter index -> what `Unit.group_rows` gave for it."""
        return {index: value for (index, name), value in self.values.items() if name == GROUP}
