"""Where a causal LM has its parts: by preset, or found and checked; refusals name what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rpruntime.errors import ConfigError
from rpruntime.models.layers import Block, Prelude, Tail, Wrapper, getattr_path, tensors_in


@dataclass(frozen=True)
class Parts:
    """Where the parts are.

    Attributes:
        path: the attributes that lead from the causal LM to the owner of the blocks.
        blocks: the owner's list of blocks.
        norm: the owner's final norm.
    """

    path: tuple[str, ...] = ("model",)
    blocks: str = "layers"
    norm: str = "norm"


_USUAL = Parts()
PRESETS = {
    "LlamaForCausalLM": _USUAL,
    "Qwen2ForCausalLM": _USUAL,
    "Qwen3ForCausalLM": _USUAL,
    "Qwen3MoeForCausalLM": _USUAL,
    "MistralForCausalLM": _USUAL,
    "GemmaForCausalLM": _USUAL,
    "Gemma2ForCausalLM": _USUAL,
    "Gemma3ForCausalLM": _USUAL,
    "GptOssForCausalLM": _USUAL,
    "PhiForCausalLM": Parts(norm="final_layernorm"),
    "Phi3ForCausalLM": _USUAL,
    "OlmoForCausalLM": _USUAL,
    "Olmo2ForCausalLM": _USUAL,
    "Olmo3ForCausalLM": _USUAL,
}
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "norm_f")


def is_transformers(model: Any) -> bool:
    """Whether it is a model of `transformers`, without importing that."""
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(model).__mro__
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether the user has registered hooks on it; those of an open pipe (`of_rpruntime`) are none."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not getattr(hook, "of_rpruntime", False) for hooks in kinds for hook in hooks.values())


def unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model in a peft model, else the model itself."""
    if type(model).__module__.split(".")[0] == "peft":
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigError("prompt learning of peft changes the model's inputs, which is not supported: use LoRA")
        inner: nn.Module = model.get_base_model()  # type: ignore[operator]
        return inner
    return model


def is_causal_lm(model: Any) -> bool:
    """Whether `layers_of` takes it apart by its parts: a transformers model, or peft's around one."""
    return isinstance(model, nn.Module) and (is_transformers(model) or is_transformers(unwrapped(model)))


def layers_of(
    model: nn.Module, *, loss: Callable[..., Tensor] | None = None, check: bool = True
) -> list[tuple[str, nn.Module]]:
    """The layers of an `nn.Sequential` or of a causal LM of `transformers`, in order: (name, module).

    The modules hold the model's own submodules; nothing of the model is changed.

    Args:
        model: an `nn.Sequential`, a `...ForCausalLM`, or a peft model around one.
        loss: computes the loss in the last layer, from `(hidden [B, S, H], head, labels [B, S])`.
        check: try out a model without a preset (its weights must be there).

    Raises:
        ConfigError: a part is missing, or the parts do not make up the model's own forward; says which.
    """
    if isinstance(model, nn.Sequential):
        return [(name, layer) for name, layer in model._modules.items() if layer is not None]
    model = unwrapped(model)
    refuse(model)
    preset = PRESETS.get(type(model).__name__)
    if preset is not None and type(model).__module__.startswith("transformers.models."):
        return _build(model, preset, loss)
    parts = _find(model)
    layers = _build(model, parts, loss)
    if check:
        _check(model, [layer for _, layer in layers])
    return layers


def follow_modes(layers: list[nn.Module]) -> None:
    """Take over the train and eval modes of the modules that wrappers stand for."""
    for layer in layers:
        for ours, theirs in layer.follows if isinstance(layer, Wrapper) else ():
            ours.training = theirs.training


def _build(model: nn.Module, parts: Parts, loss: Callable[..., Tensor] | None) -> list[tuple[str, nn.Module]]:
    kind = type(model).__name__
    for path in ((*parts.path, parts.blocks), (*parts.path, parts.norm)):
        try:
            getattr_path(model, path)
        except AttributeError as err:
            raise ConfigError(
                f"{kind} has no {'.'.join(path)} in this version of transformers, so it cannot be cut into layers"
            ) from err
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    prelude = Prelude(model, parts.path, parts.blocks, parts.norm, takes_labels=loss is not None)
    blocks = getattr_path(model, (*parts.path, parts.blocks))
    where = ".".join((*parts.path, parts.blocks))
    layers: list[tuple[str, nn.Module]] = [(names.get(id(model.get_input_embeddings()), "embedding"), prelude)]  # type: ignore[operator]
    layers += [(f"{where}.{index}", Block(block, index, model)) for index, block in enumerate(blocks)]
    tail = Tail(model, parts.path, parts.norm, loss)
    layers.append((names.get(id(model.get_output_embeddings()), "head"), tail))  # type: ignore[operator]
    if loss is not None:
        _check_plain_head(model, tail)
    return layers


def refuse(model: nn.Module) -> None:
    """Raises ConfigError for what a causal LM must not have, with the line to change."""
    kind = type(model).__name__
    if not is_transformers(model):
        raise ConfigError(
            f"RoundPipe needs an nn.Sequential, whose entries are the layers, or a causal LM of transformers (pip "
            f"install 'rpruntime[hf]'), not a {kind}: write the model as nn.Sequential(embedding, block, ..., head)"
        )
    config: Any = model.config
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        raise ConfigError(f"{kind} is quantised, which cannot be trained here: load it without quantization_config")
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:  # type: ignore[operator]
        raise ConfigError("the model was loaded with device_map: leave that out, RoundPipe brings layers to devices")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} is an encoder with a decoder; only decoder-only models can be cut into layers")
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "the auxiliary loss of the routers would not be added to the loss, as it needs every layer's routing in "
            "one place: set model.config.output_router_logits = False to train without it"
        )
    if getattr(config, "_attn_implementation", None) == "flex_attention":
        raise ConfigError('block masks of flex_attention cannot travel: model.set_attn_implementation("sdpa")')
    for what, part in (("embedding", "get_input_embeddings"), ("head", "get_output_embeddings")):
        try:
            found = getattr(model, part)()
        except (AttributeError, NotImplementedError):
            found = None
        if found is None:
            raise ConfigError(
                f"{kind} has no {what} ({part}() gives none), so it is no causal LM that can be cut into layers: load "
                "it with AutoModelForCausalLM, or write it as an nn.Sequential"
            )
    base: Any = getattr(model, getattr(model, "base_model_prefix", ""), None)
    for name, module in (("the model", model), ("its base model", base)):
        if module is None:
            continue
        if has_hooks(module):
            raise ConfigError(f"hooks on {name} ({type(module).__name__}) would not run: register them on its parts")
        if "forward" in module.__dict__:
            raise ConfigError(f"the forward of {name} ({type(module).__name__}) was replaced, which would not run")


def refuse_merged(model: nn.Module) -> None:
    """Raises ConfigError for adapters that are merged into the weights: trained, they would get no gradient."""
    for name, module in model.named_modules():
        if vars(module).get("merged_adapters"):
            raise ConfigError(
                f"the adapters of {name} are merged into its weights, where they get no gradient: "
                "model.unmerge_adapter() before RoundPipe"
            )


def _find(model: nn.Module) -> Parts:
    """The parts of a model without a preset."""
    kind = type(model).__name__
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    lists = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(lists) != 1:
        what = f"several lists of {count} blocks ({', '.join(lists)})" if lists else f"no list of {count} blocks"
        raise ConfigError(f"{_cannot(kind)}: it has {what}")
    *path, blocks = lists[0].split(".")
    if not path:
        raise ConfigError(f"{_cannot(kind)}: its blocks are in no base model of their own")
    owner = getattr_path(model, tuple(path))
    norm = next((name for name in _NORMS if isinstance(getattr(owner, name, None), nn.Module)), None)
    if norm is None:
        raise ConfigError(f"{_cannot(kind)}: {'.'.join(path)} has no final norm (looked for {', '.join(_NORMS)})")
    return Parts(tuple(path), blocks, norm)


def _cannot(kind: str) -> str:
    return f"{kind} has no preset and cannot be cut into layers; write it as an nn.Sequential"


def _check(model: nn.Module, layers: list[nn.Module]) -> None:
    """Raises ConfigError unless the layers, one after the other, are the model's own forward (on a tiny input)."""
    kind = type(model).__name__
    prelude, *rest = layers
    vocab = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = (torch.arange(10) * 7 % vocab).reshape(2, 5)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    with _evaluating(model):
        try:
            with torch.no_grad():
                wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            with torch.enable_grad():
                value = prelude(input_ids=ids, attention_mask=mask)
            learned = any(tensor.requires_grad for tensor in tensors_in(value.calls))
            with torch.no_grad():
                for layer in rest:
                    value = layer(value)
        except Exception as err:
            raise ConfigError(
                f"{_cannot(kind)}: calling its parts one by one fails ({type(err).__name__}: {err})"
            ) from err
    if learned:
        raise ConfigError(f"{_cannot(kind)}: beside the hidden states its blocks take tensors that need a gradient")
    if value.shape != wanted.shape or not torch.allclose(
        value, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())
    ):
        raise ConfigError(f"{_cannot(kind)}: calling its parts one by one gives other logits than its own forward")


def _check_plain_head(model: nn.Module, tail: Tail) -> None:
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is nn.Linear:
        hidden = torch.linspace(-1, 1, head.in_features, dtype=head.weight.dtype).reshape(1, 1, -1)
        with torch.no_grad(), _evaluating(model):
            if torch.equal(tail.logits(hidden), head(hidden)):
                return
    raise ConfigError(
        f"the logits of {type(model).__name__} are more than a plain linear head (scaling, a soft cap or an adapter), "
        "which the chunked loss does not compute: use rp.losses.causal_lm"
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """eval() for a while; every module has its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
