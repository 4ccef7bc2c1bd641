"""The script's optimizer while its model is loaded: it describes, and the optimizer process steps."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from rpruntime.errors import ConfigError, RoundPipeError

if TYPE_CHECKING:
    from rpruntime.model import Model

_HYPER_TYPES = (int, float, bool, str, type(None))


def patch_optimizer(optimizer: torch.optim.Optimizer, model: Model) -> None:
    """`step` and `state_dict` of the script's optimizer, whose real state is in the optimizer process."""
    owner = weakref.ref(model)

    def step(*args: Any, **kwargs: Any) -> Any:
        raise RoundPipeError("the optimizer runs in a process of its own: call pipe.step() instead of optimizer.step()")

    def state_dict() -> dict[str, Any]:
        found = owner()
        if found is None or not found.synchronized:
            raise RoundPipeError("the optimizer's state is in another process: call pipe.synchronize() first")
        fill_state(optimizer, found)
        return type(optimizer).state_dict(optimizer)

    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        raise RoundPipeError(
            "the optimizer's state is in another process: call optimizer.load_state_dict(...) before RoundPipe, or "
            "pipe.load_checkpoint(folder)"
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers leave it alone and do not warn
    optimizer.step = step  # type: ignore[method-assign]
    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def fill_state(optimizer: torch.optim.Optimizer, model: Model) -> None:
    """The optimizer process's state into the script's optimizer."""
    for (unit, index, name), value in model.read_state("state").items():
        optimizer.state[model.layout.parameters[unit, index]][name] = value


def unpatch_optimizer(optimizer: torch.optim.Optimizer, *, lost: bool) -> None:
    """Its own methods again; `lost`: its state has gone with the model, and asking for it is an error."""
    for name in ("step", "state_dict", "load_state_dict"):
        optimizer.__dict__.pop(name, None)
    if not lost:
        return

    def state_dict() -> dict[str, Any]:
        raise RoundPipeError(
            "the optimizer's state went with its pipe: call pipe.synchronize() and optimizer.state_dict() before "
            "pipe.close()"
        )

    optimizer.state_dict = state_dict  # type: ignore[method-assign]


def hyper_parameters(optimizer: torch.optim.Optimizer, stepped: set[int]) -> tuple[dict[str, Any], ...]:
    """Every group's hyper-parameters as plain values. `stepped`: ids of the parameters that are trained.

    Raises:
        ConfigError: a group has got a parameter since the model was wrapped.
    """
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        if any(id(p) not in stepped for p in group["params"] if p.requires_grad):
            raise ConfigError(
                f"param_groups[{number}] changed after the model was wrapped: add groups before RoundPipe"
            )
        plain: dict[str, Any] = {}
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, _HYPER_TYPES):
                plain[key] = value
            elif (
                isinstance(value, list | tuple) and key != "params" and all(isinstance(v, _HYPER_TYPES) for v in value)
            ):
                plain[key] = tuple(value)
        groups.append(plain)
    return tuple(groups)
