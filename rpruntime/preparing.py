"""A user's model, optimizer and settings, checked and laid out before any process hears of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rpruntime import losses
from rpruntime.errors import ConfigError
from rpruntime.layout import ModelLayout, check_model, check_optimizer, lay_out
from rpruntime.models.parts import is_causal_lm
from rpruntime.scaler import GradScaler, choose_scaler

MAX_MICROBATCHES = 4096
_RECOMPUTE = ("stage", "layer")


@dataclass
class Prepared:
    """What `Model` loads.

    Attributes:
        module: the user's model.
        layout: where its parameters will live.
        cast: whether parameters are cast.
        labels_in_dict: labels may be the entry "labels" of the inputs.
        labels_to_model: the model computes the loss and gets the labels too.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    name: str
    layout: ModelLayout
    loss_fn: Callable[..., Any] | None
    loss_weight: Callable[..., Any] | None
    chunk_dims: dict[str | int, int | None] | None
    asynchronous: bool
    recompute: str
    grad_scaler: GradScaler | None
    seed: int | None
    cast: bool
    labels_in_dict: bool
    labels_to_model: bool


def prepare(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    name: str = "default",
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_weight: Callable[..., Any] | None = None,
    chunk_dims: dict[str | int, int | None] | None = None,
    asynchronous: bool = False,
    recompute: str = "stage",
    grad_scaler: Any = None,
    seed: int | None = None,
) -> Prepared:
    """Check and lay out; the arguments are those of `RoundPipe`.

    Raises:
        ConfigError: something cannot be wrapped; names it and the line to change.
    """
    if recompute not in _RECOMPUTE:
        raise ConfigError(f"recompute must be one of {', '.join(_RECOMPUTE)}, not {recompute!r}")
    for setting, value in (("dtype", dtype), ("grad_dtype", grad_dtype)):
        if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise ConfigError(f"{setting} must be a floating torch dtype such as torch.bfloat16, not {value!r}")
    check_model(module)
    if optimizer is not None:
        check_optimizer(optimizer, module)
    causal_lm = is_causal_lm(module)
    if causal_lm and loss_fn is None:
        loss_fn = losses.causal_lm
    chunked = loss_fn is losses.causal_lm_chunked
    if chunked and not causal_lm:
        raise ConfigError("causal_lm_chunked needs a causal LM of transformers: use rp.losses.LinearCrossEntropy")
    if loss_weight is None:
        loss_weight = getattr(loss_fn, "loss_weight", None)
    layout = lay_out(module, optimizer, dtype, grad_dtype, losses.chunked_head if chunked else None)
    prepared = Prepared(
        module=module,
        optimizer=optimizer,
        name=name,
        layout=layout,
        loss_fn=loss_fn,
        loss_weight=loss_weight,
        chunk_dims=chunk_dims,
        asynchronous=asynchronous,
        recompute=recompute,
        grad_scaler=choose_scaler(grad_scaler, layout),
        seed=seed,
        cast=dtype is not None,
        labels_in_dict=causal_lm or loss_fn in losses.BUILT_IN,
        labels_to_model=chunked,
    )
    if optimizer is not None and not any(unit.trainable for unit in layout.units):
        raise ConfigError(
            "the optimizer has nothing to train: no parameter of its groups requires a gradient; make it after the "
            "adapters (peft.get_peft_model, or PeftModel.from_pretrained with is_trainable=True), or set "
            "requires_grad before wrapping the model, or pass optimizer=None to evaluate only"
        )
    return prepared


def check_num_microbatches(count: Any) -> None:
    """Raises ConfigError for a number of micro-batches that no call may have."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"num_microbatches must be a positive integer, not {count!r}")
    if count > MAX_MICROBATCHES:
        raise ConfigError(f"num_microbatches is {count}; {MAX_MICROBATCHES} at most, more calls a step do the rest")
