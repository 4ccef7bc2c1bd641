"""What is wrong with a batch for a causal LM, said before it travels.

On a GPU a token that the model does not have is a fault in a kernel, which ends the process of that device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rpruntime.errors import ConfigError
from rpruntime.losses import IGNORE_INDEX
from rpruntime.models.parts import unwrapped


class BatchCheck:
    """Of one causal LM. Looks at values on the CPU alone, so that nothing waits for a device.

    Args:
        model: the causal LM, or a peft model around one.
        labels: whether labels are token ids like the inputs (the loss is one of `rp.losses`).
        say_once: tells the user what may be meant.
    """

    def __init__(self, model: nn.Module, *, labels: bool, say_once: Callable[[str], None]) -> None:
        lm: Any = unwrapped(model)
        self._num_embeddings = getattr(lm.get_input_embeddings(), "num_embeddings", None)
        self._num_logits = getattr(lm.get_output_embeddings(), "out_features", None)
        self._context = getattr(lm.config, "max_position_embeddings", None)
        self._labels = labels
        self._say_once = say_once

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], labels: Any) -> None:
        """Raises ConfigError for a micro-batch that the model cannot take."""
        ids = args[0] if args else kwargs.get("input_ids")
        if not isinstance(ids, Tensor):
            return  # inputs_embeds, or what the model itself will refuse
        if ids.dim() != 2 or ids.is_floating_point():
            raise ConfigError(
                f"input_ids must be whole numbers [B, S], not {ids.dtype} {list(ids.shape)}"
                + (": for one row, ids[None]" if ids.dim() == 1 else "")
            )
        _check_range("input_ids", ids, self._num_embeddings)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != ids.shape:
            raise ConfigError(f"attention_mask is {list(mask.shape)}, but input_ids is {list(ids.shape)}")
        labels = kwargs.get("labels") if labels is None else labels
        if self._labels and isinstance(labels, Tensor):
            if labels.shape != ids.shape:
                raise ConfigError(
                    f"labels is {list(labels.shape)}, but input_ids is {list(ids.shape)}: labels are the input ids, "
                    f"not shifted, {IGNORE_INDEX} where a token does not count"
                )
            _check_range("labels", labels, self._num_logits, IGNORE_INDEX)
        self._check_context(ids, kwargs.get("position_ids"))

    def _check_context(self, ids: Tensor, positions: Any) -> None:
        longest = ids.shape[1]
        if self._context is None or longest <= self._context:
            return
        if isinstance(positions, Tensor):  # several examples in a row have positions of their own
            if positions.device.type != "cpu" or not positions.numel():
                return
            longest = int(positions.max()) + 1
        if longest > self._context:
            self._say_once(
                f"there are rows longer than the model's context of {self._context} tokens (max_position_embeddings), "
                "beyond which most models are of no use: cut them"
            )


def _check_range(name: str, ids: Tensor, count: int | None, ignored: int | None = None) -> None:
    if count is None or ids.device.type != "cpu" or not ids.numel():
        return
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 and ignored is not None:
        low = int(ids.masked_fill(ids == ignored, 0).min())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        but = f" or {ignored}" if ignored is not None else ""
        raise ConfigError(
            f"{name} holds {wrong}, but the model's tokens are 0 to {count - 1}{but}: are tokenizer and model of one "
            "model? For new tokens, model.resize_token_embeddings(len(tokenizer)) before RoundPipe"
        )
