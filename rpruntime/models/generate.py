"""A simple loop to look at what a model says; every token is a full forward, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpruntime.errors import ConfigError
from rpruntime.models.layers import parameters_of
from rpruntime.models.parts import is_causal_lm, unwrapped

if TYPE_CHECKING:
    from rpruntime.pipe import RoundPipe

_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length, those that are shorter padded on the left.

    Attributes:
        ids: int64 [B, S].
        mask: int64 [B, S], 0 where it is padding; None: nothing is.
        single: one prompt was given, without a dim for rows.
    """

    ids: Tensor
    mask: Tensor | None
    single: bool


def prompts_of(input_ids: Any, attention_mask: Any = None, *, padding: Mapping[str, Any] | None = None) -> Prompts:
    """Check what `generate` was given.

    Args:
        input_ids: [B, S] or [S], tensor or nested lists, or what a tokenizer returns.
        attention_mask: like `input_ids`, 0 for padding; None: nothing is padding.
        padding: the model's `pad_token_id`, `bos_token_id` and `eos_token_id`, which give padding without a mask away.

    Raises:
        ConfigError: these are no prompts that can be continued together; says what to do.
    """
    if isinstance(input_ids, Mapping):
        attention_mask = input_ids.get("attention_mask") if attention_mask is None else attention_mask
        input_ids = input_ids["input_ids"]
    ids = _as_tensor(input_ids, "input_ids")
    mask = None if attention_mask is None else _as_tensor(attention_mask, "attention_mask")
    single = ids.dim() == 1
    if mask is not None and mask.shape != ids.shape:
        raise ConfigError(f"attention_mask must have the shape of input_ids, {list(ids.shape)}, not {list(mask.shape)}")
    ids, mask = (ids[None] if single else ids), (mask[None] if single and mask is not None else mask)
    if ids.dim() != 2 or not ids.numel():
        raise ConfigError(f"input_ids must be [B, S] with at least one token, not {list(ids.shape)}")
    if mask is None:
        _refuse_hidden_padding(ids, padding or {})
        return Prompts(ids, None, single)
    mask = (mask != 0).long()
    for row in torch.nonzero((mask[:, 1:] < mask[:, :-1]).any(1) | (mask[:, -1] == 0)).flatten().tolist():
        raise ConfigError(
            f"prompt {row} has padding behind its tokens, where its continuation would come: pad on the left "
            '(tokenizer.padding_side = "left")'
        )
    return Prompts(ids, None if bool(mask.all()) else mask, single)


def _as_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        value = [item.tolist() if isinstance(item, Tensor) else item for item in value]
    try:
        return torch.as_tensor(value, dtype=torch.int64, device="cpu")
    except (ValueError, TypeError) as err:
        raise ConfigError(
            f"{name} must be [B, S] or [S] of whole numbers; prompts of different lengths are padded on the left and "
            'get an attention_mask: tokenizer.padding_side = "left", then pipe.generate(**tokenizer(prompts, '
            'padding=True, return_tensors="pt")), or they go one by one'
        ) from err


def _refuse_hidden_padding(ids: Tensor, special: Mapping[str, Any]) -> None:
    """Padding that no mask tells of would be taken for text."""
    pad, bos, eos = (special.get(f"{name}_token_id") for name in ("pad", "bos", "eos"))
    if pad is None:
        return
    ends = eos if isinstance(eos, list | tuple) else [eos]
    found = torch.zeros(len(ids), dtype=torch.bool)
    if pad != bos:
        found |= ids[:, 0] == pad
    if pad not in ends:
        found |= ids[:, -1] == pad
    for row in torch.nonzero(found).flatten().tolist():
        raise ConfigError(
            f"prompt {row} is padded (token {pad}), which would be taken for text: pass attention_mask too, 0 for "
            'padding on the left (tokenizer.padding_side = "left"), 1 everywhere if it is no padding'
        )


def prompted(
    pipe: RoundPipe, input_ids: Any, attention_mask: Any
) -> tuple[Callable[[Tensor, Tensor | None], Tensor], Prompts]:
    """What gives `generate` the logits of a pipe's model, and the prompts. Raises ConfigError as `prompts_of`."""
    lm: Any = unwrapped(pipe.model) if is_causal_lm(pipe.model) else None
    special = {name: getattr(lm.config, name, None) for name in _SPECIAL} if lm is not None else {}
    prompts = prompts_of(input_ids, attention_mask, padding=special)
    if prompts.mask is not None and lm is None:
        raise ConfigError("attention_mask goes with a causal LM of transformers: give prompts of one length")
    takes_positions = lm is not None and parameters_of(lm.forward)("position_ids")

    def next_logits(ids: Tensor, mask: Tensor | None) -> Tensor:
        inputs: Any = ids if lm is None else {"input_ids": ids, "logits_to_keep": 1}
        if mask is not None:
            inputs["attention_mask"] = mask
            if takes_positions:  # as transformers counts them
                inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        output = pipe.forward(inputs, num_microbatches=min(len(ids), pipe._num_microbatches))
        logits: Tensor = getattr(output, "logits", output)[:, -1]
        return logits

    return next_logits, prompts


def generate(
    next_logits: Callable[[Tensor, Tensor | None], Tensor],
    prompts: Prompts,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue prompts token by token.

    Args:
        next_logits: ids and mask (or None), [B, S] -> logits [B, V] of the token behind them.
        prompts: what is continued.
        max_new_tokens: at most that many are added.
        temperature: 0 takes the likeliest token; else one is drawn from softmax(logits / temperature).
        eos_token_id: a row that has drawn it (or one of them) is over, and is filled with it.
        seed: of the draws (default: from torch's generator).

    Returns prompts and continuations, int64 [B, S + new] (or [S + new]).

    Raises:
        ConfigError: an argument out of range.
    """
    ids, mask = prompts.ids, prompts.mask
    if temperature < 0 or max_new_tokens < 0:
        raise ConfigError("temperature and max_new_tokens must be 0 or more")
    stops = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    over = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits = next_logits(ids, mask).float()
        if temperature == 0:
            chosen = logits.argmax(-1)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        if stops:
            chosen = torch.where(over, torch.full_like(chosen, stops[0]), chosen)
            over = over | torch.isin(chosen, torch.tensor(stops))
        ids = torch.cat([ids, chosen[:, None]], 1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        if bool(over.all()):
            break
    return ids[0] if prompts.single else ids
