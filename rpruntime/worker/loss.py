"""A micro-batch's loss: what the user's function returned, looked at before anything relies on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rpruntime.errors import ConfigError
from rpruntime.worker.segment import tensors_within

MAX_METRICS = 1000

LossFn = Callable[..., Any] | None
"""None: the last layer's output is the loss."""


def loss_of(loss_fn: LossFn, value: Any, *labels: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss, a tensor with one element, and the metrics beside it. Raises ConfigError: it is something else."""
    result = value if loss_fn is None else loss_fn(value, *labels)
    metrics: dict[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        result, metrics = result
        if len(metrics) > MAX_METRICS:
            raise ConfigError(f"loss_fn returned {len(metrics)} metrics; {MAX_METRICS} at most are reported")
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        what = "the last layer's output (loss_fn is None)" if loss_fn is None else "loss_fn's result"
        shape = (
            f"a tensor of shape {tuple(result.shape)}"
            if isinstance(result, torch.Tensor)
            else f"a {type(result).__name__}"
        )
        if not isinstance(result, torch.Tensor):
            advice = "return the tensor itself (without .item() or float())"
        elif loss_fn is None:
            advice = "pass loss_fn=, or take its mean in a layer"
        else:
            advice = "take its mean, for example"
        raise ConfigError(f"the loss must be a tensor with one element, but {what} is {shape}; {advice}")
    return result, metrics


def why_no_gradient(loss_fn: LossFn, value: Any, loss: torch.Tensor) -> str:
    """What to say of a loss that nothing can be trained by; `value`: the last layer's output."""
    from_loss_fn = loss_fn is not None and any(tensor.requires_grad for tensor in tensors_within(value))
    what = "loss_fn's result" if from_loss_fn else "the last layer's output"
    dtype = str(loss.dtype).removeprefix("torch.")
    return (
        f"{what} has no gradient ({dtype}), so nothing would be trained: return it as it was computed, without "
        ".detach(), .item(), torch.no_grad() or argmax; a micro-batch in which nothing counts gets "
        "weight 0 from loss_weight="
    )
