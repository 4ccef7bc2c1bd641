"""A simple loop to look at what a model says; every token is a full forward, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rpruntime.errors import ConfigError


def generate(
    next_logits: Callable[[Tensor], Tensor],
    input_ids: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue prompts token by token.

    Args:
        next_logits: ids [B, S] -> logits [B, V] of the token behind them.
        input_ids: prompts of one length, [B, S], or one prompt, [S]; tensor or nested lists.
        max_new_tokens: at most that many are added.
        temperature: 0 takes the likeliest token; else one is drawn from softmax(logits / temperature).
        eos_token_id: a row that has drawn it (or one of them) is over, and is filled with it.
        seed: of the draws (default: from torch's generator).

    Returns prompts and continuations, int64 [B, S + new] (or [S + new]).

    Raises:
        ConfigError: an argument out of range.
    """
    ids = torch.as_tensor(input_ids, dtype=torch.int64, device="cpu")
    single = ids.dim() == 1
    ids = ids[None] if single else ids
    if ids.dim() != 2 or not ids.numel():
        raise ConfigError(f"input_ids must be [B, S] with at least one token, not {list(ids.shape)}")
    if temperature < 0 or max_new_tokens < 0:
        raise ConfigError("temperature and max_new_tokens must be 0 or more")
    stops = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    over = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits = next_logits(ids).float()
        if temperature == 0:
            chosen = logits.argmax(-1)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        if stops:
            chosen = torch.where(over, torch.full_like(chosen, stops[0]), chosen)
            over = over | torch.isin(chosen, torch.tensor(stops))
        ids = torch.cat([ids, chosen[:, None]], 1)
        if bool(over.all()):
            break
    return ids[0] if single else ids
