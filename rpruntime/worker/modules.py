"""A model inside a worker: its layers as modules whose parameters point at whatever slab was uploaded last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rpruntime.buffers import buffer_places
from rpruntime.errors import ConfigError
from rpruntime.store.arena import Store, view
from rpruntime.store.handle import Payload, TensorHandle
from rpruntime.store.values import put_together
from rpruntime.wire.messages import LayerSpec, ModelSpec, UnitSpec
from rpruntime.worker.tail import Tail


def read_bytes(store: Store, handle: TensorHandle) -> bytes:
    """The bytes behind a uint8 handle (pickled skeletons and closures)."""
    return bytes(store.tensor(handle).numpy())


@dataclass
class _CachedBuffer:
    handle: TensorHandle
    tensor: torch.Tensor
    version: int


class LayerModule:
    """One position: the unpickled module, its parameters by (unit, index), its buffers by name.

    Each position has a module of its own, also where the script's model repeats one, so that a shared parameter is a
    separate leaf per position (docs/numerics.md).
    """

    def __init__(self, spec: LayerSpec, units: tuple[UnitSpec, ...], store: Store, device: torch.device) -> None:
        self.spec = spec
        self.parameters: dict[tuple[int, int], nn.Parameter] = {}
        self._units = units
        self._store = store
        stand_ins = [self._stand_in(entry, store, device) for entry in spec.module.tensors]
        self.module: nn.Module = put_together(read_bytes(store, spec.module.data), stand_ins)
        self.tail = Tail(self.module)
        self._buffers = list(buffer_places(self.module))
        self._silent = {
            name
            for name, owner, local in self._buffers
            if isinstance(owner, nn.modules.batchnorm._NormBase) or local.startswith("running_")
        }
        """Buffers that torch's kernels write in training mode without telling their version counters."""
        self._modes = [(module, module.training) for module in self.module.modules()]
        self._cache: dict[str, _CachedBuffer] = {}
        self._bound: dict[str, tuple[torch.Tensor, int]] = {}

    def _stand_in(self, entry: tuple[Any, ...], store: Store, device: torch.device) -> Any:
        if entry[0] == "param":
            _, unit, index = entry
            dtype = getattr(torch, self._units[unit].params[index].dtype)
            parameter = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
            return self.parameters.setdefault((unit, index), parameter)
        if entry[0] == "buffer":
            return torch.empty(0, device=device)
        return store.tensor(entry[1]).clone().to(device)

    def start_slot(self) -> None:
        """Forget uploaded buffers: what their handles name stays the same within a slot, not beyond."""
        self._cache.clear()

    def bind_parameters(self, slabs: dict[int, torch.Tensor], *, with_gradients: bool) -> None:
        """Point the parameters at device slabs (uint8 [unit bytes]); trainable ones want gradients or not."""
        for (unit, index), parameter in self.parameters.items():
            spec = self._units[unit].params[index]
            parameter.grad = None
            parameter.requires_grad_(False)
            parameter.data = view(slabs[unit], spec.offset, spec.shape, spec.dtype)
            parameter.requires_grad_(with_gradients and self._units[unit].trainable)

    def release_parameters(self) -> None:
        """Let go of the slabs."""
        for parameter in self.parameters.values():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    def set_modes(self, training: bool, modes: bytes | None) -> None:
        """train() or eval() for every submodule: as the script has them, or all in eval mode."""
        for index, (module, at_load) in enumerate(self._modes):
            flag = at_load if modes is None else bool(modes[index])
            module.training = training and flag

    # --- buffers

    def bind_buffers(self, payload: Payload, upload: Callable[[TensorHandle], torch.Tensor]) -> None:
        """Give the module the buffers of a payload: a dict of name -> tensor or None."""
        handles = put_together(self._store.skeleton(payload), payload.tensors)
        self._bound = {}
        for name, owner, local in self._buffers:
            handle = handles.get(name)
            if handle is None:
                owner._buffers[local] = None
                continue
            if name in self._silent and owner.training:
                self._cache.pop(name, None)
                owner._buffers[local] = upload(handle)
                continue
            cached = self._cache.get(name)
            if cached is None or cached.handle != handle or cached.tensor._version != cached.version:
                tensor = upload(handle)
                cached = self._cache[name] = _CachedBuffer(handle, tensor, tensor._version)
            owner._buffers[local] = cached.tensor
            self._bound[name] = (cached.tensor, cached.version)

    def check_changes(self, changed: set[str], *, cast: bool) -> None:
        """Raises ConfigError for buffers that must not change."""
        for name, owner, local in self._buffers:
            if name not in changed:
                continue
            if self.spec.shared:
                raise ConfigError(
                    f"buffer {name} of {self.spec.class_name} changes in forward, and the same module stands at two "
                    "positions of the model: give each position a module of its own"
                )
            buffer = owner._buffers[local]
            running = isinstance(owner, nn.modules.batchnorm._NormBase)
            if cast and not running and buffer is not None and buffer.is_floating_point():
                raise ConfigError(
                    f"buffer {name} of {self.spec.class_name} changes in forward, but dtype= casts parameters around "
                    f"it and not buffers: cast the model yourself (model.to(...)) and leave dtype=None"
                )

    def buffers_now(self) -> tuple[dict[str, torch.Tensor | None], set[str]]:
        """(all buffers, names of those that forward changed or replaced, or may have changed)."""
        now = {name: owner._buffers.get(local) for name, owner, local in self._buffers}
        changed = {
            name
            for name, tensor in now.items()
            if tensor is not None
            and (
                name not in self._bound or self._bound[name][0] is not tensor or self._bound[name][1] != tensor._version
            )
        }
        return now, changed


class WorkerModel:
    """All layers of a model, and the loss function."""

    def __init__(self, msg: ModelSpec, store: Store, device: torch.device) -> None:
        self.msg = msg
        self.layers = [LayerModule(spec, msg.units, store, device) for spec in msg.layers]
        self.loss_fn: Callable[..., Any] | None = None
        if msg.loss_fn is not None:
            constants = [store.tensor(entry[1]).clone().to(device) for entry in msg.loss_fn.tensors]
            self.loss_fn = put_together(read_bytes(store, msg.loss_fn.data), constants)
        first_trainable = min(
            (p for unit in msg.units if unit.trainable for p in unit.positions), default=len(msg.layers)
        )
        self.first_trainable = first_trainable
        """Inputs of layers after this one want gradients; those before and at it lead to no parameter."""

    def trainable_units(self, position: int) -> list[UnitSpec]:
        """Units with gradients at a position."""
        return [self.msg.units[unit] for unit in self.msg.layers[position].units if self.msg.units[unit].trainable]
