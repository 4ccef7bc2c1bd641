"""Losses for language models (`rp.losses`): a causal LM's, and a head with cross entropy that never holds all logits.

A loss function may carry its weight function as the attribute `loss_weight`: `RoundPipe(loss_fn=...)` takes it where no
`loss_weight` is given. `causal_lm` weighs a micro-batch by the labels that count, so the loss of a call is the mean
over all of them, however the batch was cut; a micro-batch without any contributes exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE_INDEX = -100


def causal_lm(logits: Any, labels: Tensor) -> Tensor:
    """Mean cross entropy of the next token over the labels that count, in fp32.

    Args:
        logits: [B, S, V], or an output object of transformers that has them.
        labels: int64 [B, S], as the input ids; -100 does not count. They are shifted here: logits at t are compared
            with labels at t + 1.

    Returns a 0-d fp32 tensor; 0, with gradients of 0, if no label counts.
    """
    logits = getattr(logits, "logits", logits)
    flat = logits[..., :-1, :].flatten(0, -2)
    wanted = labels[..., 1:].flatten()
    total = F.cross_entropy(_wide(flat), wanted, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (wanted != IGNORE_INDEX).sum().clamp(min=1)


def num_counted_labels(labels: Tensor) -> Tensor:
    """How many shifted labels count: the weight of `causal_lm` and `causal_lm_chunked`. labels: [B, S]."""
    return (labels[..., 1:] != IGNORE_INDEX).sum()


causal_lm.loss_weight = num_counted_labels  # type: ignore[attr-defined]


def causal_lm_chunked(loss: Tensor, labels: Tensor | None = None) -> Tensor:
    """`causal_lm` of a transformers model whose head runs inside the loss, a chunk of tokens at a time.

    Give it as `loss_fn` to a `RoundPipe` of a causal LM with a plain linear head: the last layer then computes the
    loss (`chunked_head`), which this function only passes on. `pipe.forward` still returns logits.
    """
    if loss.dim():
        raise ValueError(
            "causal_lm_chunked goes with a transformers causal LM; for other models use LinearCrossEntropy"
        )
    return loss


causal_lm_chunked.loss_weight = num_counted_labels  # type: ignore[attr-defined]


def chunked_head(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """What the last layer computes for `causal_lm_chunked`. hidden: [B, S, H]; labels: [B, S]."""
    return linear_cross_entropy(hidden[..., :-1, :], head.weight, labels[..., 1:], bias=head.bias)


BUILT_IN = (causal_lm, causal_lm_chunked)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_tokens: int = 1024,
) -> Tensor:
    """`F.cross_entropy(hidden @ weight.T + bias, labels)`, mean over the labels that count, by chunks of tokens.

    At most `chunk_tokens` rows of logits exist at once. Gradients are computed in the forward, while a chunk's logits
    are there; softmax and sums are in fp32 (fp64 inputs: fp64).

    Args:
        hidden: [..., H]. weight: [V, H]. bias: [V]. labels: int64 [...], not shifted; `ignore_index` does not count.

    Returns a 0-d tensor in fp32 (fp64); 0, with gradients of 0, if no label counts.

    Raises:
        ValueError: the shapes do not fit, or chunk_tokens is not positive.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels {list(labels.shape)} do not fit"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, not {chunk_tokens}")
    flat = hidden.reshape(-1, hidden.shape[-1])
    grad = torch.is_grad_enabled()
    loss: Tensor = _LinearCrossEntropy.apply(flat, weight, bias, labels.flatten(), ignore_index, chunk_tokens, grad)
    return loss


class LinearCrossEntropy(nn.Module):
    """A head without bias whose output is the loss, as a last layer: `(hidden [..., H], labels [...]) -> 0-d loss`.

    In an `nn.Sequential` the layer before it returns the pair; `RoundPipe(loss_fn=None)` takes its output as the loss.
    Labels are not shifted.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        ignore_index: int = IGNORE_INDEX,
        chunk_tokens: int = 1024,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, num_classes, bias=bias)
        self.weight, self.bias = linear.weight, linear.bias
        self.ignore_index, self.chunk_tokens = ignore_index, chunk_tokens

    def forward(self, hidden: Any, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            hidden, labels = hidden
        return linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            bias=self.bias,
            ignore_index=self.ignore_index,
            chunk_tokens=self.chunk_tokens,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,
        labels: Tensor,  # [N]
        ignore_index: int,
        chunk_tokens: int,
        grad_enabled: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        counted = labels != ignore_index
        num = counted.sum().clamp(min=1)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        needs = [grad_enabled and flag for flag in ctx.needs_input_grad[:3]]
        d_hidden = torch.zeros_like(hidden) if needs[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None
        for start in range(0, len(labels), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            rows, valid = hidden[part], counted[part, None]
            logits = F.linear(rows, weight, bias).to(wide)
            target = torch.where(counted[part], labels[part], 0)[:, None]
            log_sum = logits.logsumexp(-1, keepdim=True)
            # where, not a product: a row that does not count may hold inf or nan
            total += torch.where(valid, log_sum - logits.gather(-1, target), 0).sum()
            if not any(needs):
                continue
            d_logits = (logits - log_sum).exp_()
            d_logits.scatter_add_(-1, target, torch.full_like(log_sum, -1))
            d_logits = torch.where(valid, d_logits / num, 0)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(rows.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight.to(rows.dtype)
            if d_weight is not None:
                d_weight += (d_logits.T @ torch.where(valid, rows, 0)).to(wide)
        ctx.save_for_backward(*(None if d is None else d for d in (d_hidden, d_weight, d_bias)))
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total / num

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        found = [None if d is None else (d * grad).to(kind) for d, kind in zip(saved, ctx.dtypes, strict=True)]
        return (*found, None, None, None, None)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
