"""What a slot writes to host memory: each event waits for the copies that it announces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rpruntime.store.arena import Arena, contiguous_stride, dtype_name, view
from rpruntime.store.handle import MAX_INLINE_SKELETON_BYTES, Extent, Payload, TensorHandle
from rpruntime.wire.messages import Key
from rpruntime.worker.events import LossEvent, PublishedEvent
from rpruntime.worker.transfers import Copy, Transfers


@dataclass
class Publication:
    """An event that waits for its copies."""

    event: Any
    copies: Sequence[Copy]

    def done(self) -> bool:
        return all(copy.done() for copy in self.copies)


@dataclass
class _PendingLoss:
    microbatch: int
    names: tuple[str, ...]
    known: list[float | None]
    """The loss and the metrics; None: it comes next in `host`."""
    host: torch.Tensor
    extent: Extent


class Outbox:
    """Of one slot.

    Args:
        slot: its number, for the events.
        transfers: copies from the device.
        arena: where they go.
    """

    def __init__(self, slot: int, transfers: Transfers, arena: Arena) -> None:
        self._slot = slot
        self._transfers = transfers
        self._arena = arena
        self._store = arena.store
        self.waiting: list[Publication] = []
        self.own: list[Extent] = []
        """All that was allocated for the slot and is not freed."""

    def add(self, event: Any, copies: Sequence[Copy]) -> None:
        """Announce something when its copies are there."""
        self.waiting.append(Publication(event, copies))

    def allocate(self, nbytes: int, kind: str = "") -> Extent:
        """Room in the arena, among extents of the kind."""
        extent = self._arena.allocate(nbytes, kind)
        self.own.append(extent)
        return extent

    def add_value(
        self,
        key: Key,
        skeleton: bytes,
        tensors: Sequence[torch.Tensor],
        flags: tuple[bool, ...],
        reused: dict[int, TensorHandle] | None = None,
    ) -> None:
        """Publish a value under `key`; tensor i of `reused` lies in host memory already."""
        found, before = reused or {}, len(self.own)
        handles = [found.get(index) or self._room_for(tensor) for index, tensor in enumerate(tensors)]
        body: bytes | TensorHandle = skeleton
        if len(skeleton) > MAX_INLINE_SKELETON_BYTES:
            body = self._arena.put_bytes(skeleton)
            self.own.append(body.extent)
        payload = Payload(body, tuple(handles), flags)
        # a clone of each: what computes next may change the tensor while it is copied, and it may be lazily negated or
        # conjugated, which copies to the host are made up for before they have arrived
        clones = [(index, tensor.detach().clone()) for index, tensor in enumerate(tensors) if index not in found]
        copies = [self._transfers.download(clone, self._store.tensor(handles[index])) for index, clone in clones]
        self.add(PublishedEvent(self._slot, key, payload, tuple(self.own[before:])), copies)

    def add_loss(self, microbatch: int, loss: torch.Tensor, metrics: dict[str, Any]) -> None:
        """Tell a loss [] and its metrics (one element each) as numbers."""
        device = self._transfers.device
        values = [torch.as_tensor(value).detach().reshape(()).float() for value in (loss, *metrics.values())]
        # what is on the host stays there: on its way to the device it would wait for all that is launched
        known = [None if value.device == device else value.item() for value in values]
        coming = [value for value in values if value.device == device]
        row = torch.stack(coming) if coming else torch.empty(0, device=device)
        extent = self.allocate(row.nbytes)
        host = view(self._store.bytes_of(extent), 0, row.shape, "float32")
        copies = [self._transfers.download(row, host)] if coming else []
        self.add(_PendingLoss(microbatch, tuple(metrics), known, host, extent), copies)

    def take(self) -> list[Any]:
        """Events whose copies have come to the host, in order of publication within each kind of copy."""
        ready: list[Publication] = []
        waiting: list[Publication] = []
        for publication in self.waiting:
            (ready if publication.done() else waiting).append(publication)
        self.waiting = waiting
        return [self._resolve(publication.event) for publication in ready]

    def _resolve(self, event: Any) -> Any:
        if not isinstance(event, _PendingLoss):
            return event
        told = iter(event.host.tolist())
        loss, *metrics = [next(told) if value is None else value for value in event.known]
        self.own.remove(event.extent)
        self._arena.free(event.extent)  # never left this process
        return LossEvent(self._slot, event.microbatch, loss, dict(zip(event.names, metrics, strict=True)))

    def _room_for(self, tensor: torch.Tensor) -> TensorHandle:
        shape = tuple(tensor.shape)
        dense = torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta").stride()
        extent = self.allocate(tensor.numel() * tensor.element_size())
        stride = dense if tensor.numel() else contiguous_stride(shape)
        return TensorHandle(extent, 0, shape, tuple(stride), dtype_name(tensor.dtype))
