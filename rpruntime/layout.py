"""From the user's model and optimizer to storage units: what is checked, what is cast, what lies together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rpruntime.errors import ConfigError
from rpruntime.models.parts import has_hooks, layers_of, refuse, refuse_merged, unwrapped
from rpruntime.store.arena import dtype_name
from rpruntime.store.layout import packed
from rpruntime.terminal import warn
from rpruntime.wire.messages import ParamSpec, UnitSpec


@dataclass
class ModelLayout:
    """Where every parameter of a model lives.

    Attributes:
        layers: the positions' modules, in order.
        names: their names in the model.
        units: the storage units.
        layer_units: units of each position.
        parameters: (unit, index) -> the script's parameter.
    """

    layers: list[nn.Module]
    names: list[str]
    units: list[UnitSpec] = field(default_factory=list)
    layer_units: list[list[int]] = field(default_factory=list)
    parameters: dict[tuple[int, int], nn.Parameter] = field(default_factory=dict)

    def place_of(self) -> dict[int, tuple[int, int]]:
        """id(parameter) -> (unit, index)."""
        return {id(parameter): place for place, parameter in self.parameters.items()}


def check_model(model: Any) -> None:
    """Raises ConfigError, with the line to change, for what cannot be wrapped."""
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigError(
            f"RoundPipe spreads the model over devices by itself: pass model.module instead of the {kind}"
        )
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            "pass the model as it was before torch.compile (model._orig_mod); compiled layers are not supported yet"
        )
    if isinstance(model, nn.Sequential):
        _check_sequential(model)
    elif isinstance(model, nn.Module):
        refuse(unwrapped(model))
    else:
        raise ConfigError(f"the model must be an nn.Module, not a {kind}")
    _check_tensors(model)


def _check_sequential(model: nn.Sequential) -> None:
    kind = type(model).__name__
    if type(model).forward is not nn.Sequential.forward:
        raise ConfigError(
            f"{kind} has a forward of its own, which would not run: make what it adds a layer of the Sequential"
        )
    if has_hooks(model):
        raise ConfigError("hooks on the nn.Sequential itself would not run: register them on its layers")
    if model._parameters or any(buffer is not None for buffer in model._buffers.values()):
        names = ", ".join([*model._parameters, *model._buffers])
        raise ConfigError(
            f"{names} belongs to the nn.Sequential itself and to no layer: move it into the layer that uses it"
        )
    if any(layer is None for layer in model._modules.values()):
        raise ConfigError("the model has an entry that is None: leave it out or use nn.Identity()")
    if len(model) == 0:
        raise ConfigError("the model is empty: nn.Sequential needs at least one layer")


def _check_tensors(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(f"{name} has a gradient hook, which would not run on the workers: remove it")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} has no shape yet: run one batch through lazy modules before wrapping the model")
        if tensor.is_inference():
            raise ConfigError(f"{name} was made in inference_mode: build the model outside it")
        if tensor.device.type == "meta":
            raise ConfigError(f"{name} is on the meta device: load or initialise the model on the CPU first")
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"{name} is on {tensor.device}: leave the model on the CPU (remove .to(...), .cuda() or "
                "device_map); RoundPipe brings each layer to a device when it runs"
            )


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raises ConfigError for optimizers that cannot step layer by layer or that hold other parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS needs a closure over the whole model; use an optimizer that steps each parameter alone"
        )
    if type(optimizer).__module__.split(".")[0] == "bitsandbytes":
        raise ConfigError(f"{type(optimizer).__name__} keeps its state on the GPU; use torch.optim.AdamW")
    refuse_merged(model)
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"param_groups[{number}] of the optimizer holds a parameter of shape {tuple(parameter.shape)} that "
                    "is not the model's: make the optimizer from this model's parameters()"
                )


def shown_class(layer: nn.Module) -> str:
    """The class to name in messages: that of what a wrapper stands for, else the layer's own."""
    return getattr(layer, "shown_as", "") or type(layer).__name__


def lay_out(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    loss_in_model: Callable[..., Any] | None = None,
) -> ModelLayout:
    """Cut a checked model into storage units: one for a layer's trainable parameters, one for its frozen ones, one for
    each parameter that several positions share. `loss_in_model`: a loss that the last layer of a causal LM computes."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    found = layers_of(model, loss=loss_in_model, check=not on_meta)
    layout = ModelLayout([layer for _, layer in found], [name for name, _ in found])
    positions: dict[int, list[int]] = {}
    for position, layer in enumerate(layout.layers):
        for parameter in dict.fromkeys(layer.parameters()):
            positions.setdefault(id(parameter), []).append(position)
    _check_storage(model)
    groups = _groups(model, optimizer)
    cast = _Cast(model, dtype)
    full_names = {id(p): name for name, p in model.named_parameters()}

    def add_unit(members: list[nn.Parameter], trainable: bool, where: list[int]) -> int:
        shapes = [tuple(p.shape) for p in members]
        dtypes = [dtype_name(cast.target(p)) for p in members]
        offsets, nbytes = packed(shapes, dtypes)
        specs = tuple(
            ParamSpec(
                full_names[id(p)],
                offset,
                shape,
                kind,
                dtype_name(grad_dtype) if grad_dtype else kind,
                groups.get(id(p), -1),
            )
            for p, offset, shape, kind in zip(members, offsets, shapes, dtypes, strict=True)
        )
        index = len(layout.units)
        layout.units.append(UnitSpec(index, trainable, tuple(where), nbytes, specs))
        layout.parameters.update({(index, i): p for i, p in enumerate(members)})
        return index

    shared: dict[int, int] = {}
    for position, layer in enumerate(layout.layers):
        own: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        units: list[int] = []
        for parameter in dict.fromkeys(layer.parameters()):
            trainable = parameter.requires_grad and (optimizer is None or id(parameter) in groups)
            where = positions[id(parameter)]
            if len(where) == 1:
                own[trainable].append(parameter)
            else:
                if id(parameter) not in shared:
                    shared[id(parameter)] = add_unit([parameter], trainable, where)
                units.append(shared[id(parameter)])
        units = [add_unit(own[kind], kind, [position]) for kind in (True, False) if own[kind]] + units
        layout.layer_units.append(units)
    return layout


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    if optimizer is None:
        return {}
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in groups]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        warn(
            f"trainable parameters that no optimizer group holds get no gradient and stay as they are: "
            f"{', '.join(missing[:3])}{more}",
        )
    return groups


def _check_storage(model: nn.Module) -> None:
    """Two parameters that overlap in memory would become independent copies: refuse."""
    spans = []
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta:  # `rpctl plan` lays out models without memory
            first = parameter.data_ptr()
            span = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
            spans.append((first, first + (span + 1) * parameter.element_size(), name))
    spans.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ConfigError(
                f"{name} and {other} are different parameters over the same memory; tie them by using one nn.Parameter "
                f"in both places, or untie them with a clone()"
            )


class _Cast:
    """Which dtype a parameter gets."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        count: Counter[torch.dtype] = Counter()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                count[parameter.dtype] += parameter.numel()
        self._main = count.most_common(1)[0][0] if count else torch.float32
        self._kept = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
            for parameter in module.parameters(recurse=False)
        }

    def target(self, parameter: nn.Parameter) -> torch.dtype:
        if self._dtype is None or parameter.dtype != self._main or id(parameter) in self._kept:
            return parameter.dtype
        return self._dtype
