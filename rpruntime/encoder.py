"""Values of a call on their way into the controller's arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rpruntime.errors import ConfigError
from rpruntime.store.handle import MAX_INLINE_SKELETON_BYTES, Payload, TensorHandle
from rpruntime.store.values import take_apart, why_not_picklable

if TYPE_CHECKING:
    from rpruntime.client import Client


class Encoder:
    """Copies one call's values into the controller's arena; a tensor that goes to every micro-batch is copied once.

    `say_once` tells the user something, once.
    """

    def __init__(self, client: Client, say_once: Callable[[str], None]) -> None:
        self._client = client
        self._say_once = say_once
        self._seen: dict[int, tuple[torch.Tensor, TensorHandle]] = {}
        self._bodies: list[TensorHandle] = []

    def free(self) -> None:
        """Give everything back: the call is not made."""
        for handle in [*(handle for _, handle in self._seen.values()), *self._bodies]:
            self._client.arena.free(handle.extent)

    def encode(self, value: Any, what: str) -> Payload:
        """Copy a value. Raises ConfigError, naming `what`, for one that cannot travel."""
        try:
            skeleton, tensors = take_apart(value)
        except Exception as err:
            raise ConfigError(f"{why_not_picklable(value, what)}; it cannot travel to a worker") from err
        body: bytes | TensorHandle = skeleton
        if len(skeleton) > MAX_INLINE_SKELETON_BYTES:
            body = self._client.arena.put_bytes(skeleton)
            self._bodies.append(body)
        return Payload(body, tuple(self._put(tensor) for tensor in tensors), (False,) * len(tensors))

    def _put(self, tensor: torch.Tensor) -> TensorHandle:
        found = self._seen.get(id(tensor))
        if found is None:
            if tensor.device.type != "cpu":
                self._say_once(f"a batch on {tensor.device} is copied to the host first: leave batches on the CPU")
            if tensor.layout is not torch.strided:
                raise ConfigError(f"a batch holds a tensor of layout {tensor.layout}; only dense tensors can travel")
            handle = self._client.arena.allocate_tensor(tuple(tensor.shape), tensor.dtype)
            self._client.store.tensor(handle).copy_(tensor.detach())
            found = self._seen[id(tensor)] = (tensor, handle)
        return found[1]
