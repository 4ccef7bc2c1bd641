"""Layers that run together with one autograd graph, and how their input enters it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rpruntime.store.handle import TensorHandle
from rpruntime.store.values import put_together


class _Entrance(torch.autograd.Function):
    """Identity whose output is no leaf, so that a layer may change its input in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@dataclass
class Entered:
    """The input of a segment on the device."""

    value: Any
    tensors: list[torch.Tensor] = field(default_factory=list)
    """The tensors in `value`."""
    leaves: list[torch.Tensor | None] = field(default_factory=list)
    """The leaf behind each tensor that wants a gradient."""
    handles: dict[int, tuple[TensorHandle, bool, int]] = field(default_factory=dict)
    """id(tensor) -> (its handle, wants a gradient, version), for tensors that may be passed on unchanged."""


def enter_tensors(skeleton: bytes, tensors: Sequence[torch.Tensor], flags: Sequence[bool]) -> Entered:
    """A value with these tensors in it; `flags[i]`: tensor i gets a leaf of its own, which takes its gradient."""
    leaves = [tensor.detach().requires_grad_() if flag else None for tensor, flag in zip(tensors, flags, strict=True)]
    entrances = [
        tensor if leaf is None else _Entrance.apply(leaf) for tensor, leaf in zip(tensors, leaves, strict=True)
    ]
    return Entered(put_together(skeleton, entrances), entrances, leaves)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists, dicts and dataclasses; those in other objects are passed over."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    items: Any = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, tuple | list):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, each.name) for each in dataclasses.fields(value)]
    for item in items:
        yield from tensors_within(item)


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of a stage; `enter` brings their input, as it was, to the device."""

    layers: range
    enter: Callable[[], Entered]

    @property
    def only_layer(self) -> int:
        """The layer to name in errors until backward has come to one; -1: there are several."""
        return self.layers.start if len(self.layers) == 1 else -1
