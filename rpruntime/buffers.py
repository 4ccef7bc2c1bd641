"""The registered buffers of a layer, by name; None where one is registered as None."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def buffer_places(layer: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name within the layer, module that has it, name within that module) of each; a shared module counts once."""
    for prefix, owner in layer.named_modules():
        for local in owner._buffers:
            yield f"{prefix}.{local}" if prefix else local, owner, local


def buffers_of(layer: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers as they are now."""
    return {name: owner._buffers[local] for name, owner, local in buffer_places(layer)}
