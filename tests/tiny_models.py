"""Small random causal LMs of transformers, by family, and a batch with padding, positions and ignored labels."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VERSION = int(transformers.__version__.split(".")[0])
_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-eager": ("Llama", {"attn_implementation": "eager"}),
    "qwen2": ("Qwen2", {**_MIXED, "use_sliding_window": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-mixed-tied": ("Qwen3", {**_MIXED, "use_sliding_window": True, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "mistral": ("Mistral", {"sliding_window": 4, "head_dim": 8}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {**_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}),
    "gpt-oss": ("GptOss", {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {}),
    "olmo": ("Olmo", {"clip_qkv": 1.0}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _MIXED),
}
"""Name -> (prefix of the classes, settings); all have presets."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt-neox": ("GPTNeoX", {}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "starcoder2": ("Starcoder2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("StableLm", {}),
}
"""Models without a preset, whose parts are found."""


def tiny(family: str, seed: int = 0, **more: Any) -> nn.Module:
    """A model of a family with random weights; all differ, norms and biases too."""
    prefix, settings = (FAMILIES | OTHERS)[family]
    settings = {**_SIZES, **settings, **more}
    attention = settings.pop("attn_implementation", None)
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    config = config_class(**settings)
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(seed)
    model_class = f"{prefix}ForCausalLM" if hasattr(transformers, f"{prefix}ForCausalLM") else f"{prefix}LMHeadModel"
    model: nn.Module = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(rows: int = 4, length: int = 10, vocab: int = 64, seed: int = 1) -> dict[str, Tensor]:
    """Row 0 is padded left, row 1 right, row 2 has no label that counts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[2] = -100
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}


def reference(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, Tensor, dict[str, Tensor]]:
    """(loss, logits, gradients by name) of the model's own forward; the model has no gradients afterwards."""
    model.zero_grad(set_to_none=True)
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return output.loss.item(), output.logits.detach(), gradients
