"""`rp.from_pretrained`: a causal LM of `transformers` whose parameters are slabs that a pipe takes over as they are.

    configuration -> model without memory -> slabs by layer -> parameters as views -> bytes of the shards into them

Where a checkpoint's names are not the model's own (experts that are fused while loading, for example), transformers
loads the model, and layer by layer its parameters move into slabs.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rpruntime import session as sessions
from rpruntime.bar import Bar
from rpruntime.client import Client, client_of
from rpruntime.errors import ConfigError
from rpruntime.models import shards
from rpruntime.models.folders import check_model_folder, explained
from rpruntime.models.parts import layers_of
from rpruntime.store.arena import dtype_name, view
from rpruntime.store.layout import packed, tensor_bytes
from rpruntime.store.limits import check_host_memory, gib, read_host_memory
from rpruntime.store.slabs import Slab
from rpruntime.terminal import say, warn

_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
_FILES = ["*.json", "*.safetensors", "*.py"]
_REFUSED = ("device_map", "quantization_config", "load_in_8bit", "load_in_4bit", "max_memory", "offload_folder")


def from_pretrained(
    name_or_folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    session: Any = None,
    **hf_kwargs: Any,
) -> Any:
    """The causal LM of a folder or a name on the hub, with CPU parameters in shared memory that a pipe does not copy.

    Safetensors are read straight into the parameters. A checkpoint that transformers converts while loading (fused
    experts, renamed weights), or one without safetensors, is loaded by transformers first, which takes the model's
    size in memory of the process's own until its layers have moved.

    Args:
        name_or_folder: as for `AutoModelForCausalLM.from_pretrained`, which downloads names in the same way.
        dtype: of the floating parameters (default: the checkpoint's own).
        session: whose memory to use (default: this process's session, made if need be).
        **hf_kwargs: `revision`, `token`, `trust_remote_code`, `attn_implementation`, values of the configuration...

    Returns:
        The model of transformers, in eval mode as there; any part of it may be changed before a pipe is made.

    Raises:
        ConfigError: there is no model, or one that cannot be trained here (a quantised checkpoint, `device_map`...),
            with the line to change.
        HostMemoryError: the machine cannot hold the weights; with the figures.
    """
    transformers = require("transformers")
    for name in _REFUSED:
        if hf_kwargs.pop(name, None):
            raise ConfigError(
                f"from_pretrained({name}=...) is not supported: leave it out, the weights stay in host memory in their "
                "own dtype and RoundPipe brings each layer to a device when it runs"
            )
    if hf_kwargs.pop("subfolder", None):
        raise ConfigError("from_pretrained(subfolder=...) is not supported: give the path of that folder itself")
    check_model_folder(name_or_folder, has_config=hf_kwargs.get("config") is not None)
    hub = {name: hf_kwargs.pop(name) for name in _HUB if name in hf_kwargs}
    dtype = hf_kwargs.pop("torch_dtype", None) if dtype is None else dtype
    config, model_kwargs = _config(transformers, name_or_folder, hub, hf_kwargs)
    session = sessions.current() if session is None else session
    client = client_of(session)
    with explained(name_or_folder, transformers):
        folder = _folder_of(name_or_folder, hub)
    entries = shards.entries_of(folder)
    wanted = _dtype(dtype, config, entries)
    quiet = bool(session.config.get("quiet"))
    with Bar("reading weights", quiet=quiet) as bar:
        sources = None
        if entries is not None:
            with explained(name_or_folder, transformers):
                model = without_memory(transformers, config, wanted, model_kwargs)
            sources = _sources(model, entries)
        if sources is not None:
            _fill(client, model, sources, wanted, bar)
            _finish(transformers, model, folder)
        else:
            if not quiet:
                say(f"weights  {name_or_folder} | its names or forms are not the model's own: transformers reads it")
            kind = "auto" if wanted is None else wanted
            with explained(name_or_folder, transformers):
                model, found = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, config=config, dtype=kind, output_loading_info=True, **model_kwargs
                )
            _warn_of_missing(name_or_folder, found["missing_keys"])
            move_into_slabs(client, model, layers_of(model, check=False), bar.update)
    if not quiet:
        say(f"weights  {gib(bar.done)} of {name_or_folder} in {bar.seconds:.1f} s")
    return model.eval()


def move_into_slabs(
    client: Client, model: nn.Module, layers: Sequence[tuple[str, nn.Module]], step: Callable[[int, int], None]
) -> None:
    """Move the parameters of a model on the CPU into slabs, laid out as a pipe would; `step(bytes, of bytes)`."""
    groups = _groups(layers)
    total = sum(p.nbytes for group in groups for p in group)
    made: list[Slab] = []
    done = 0
    try:
        for group in groups:
            slab, views = _slab(client, group, [p.dtype for p in group])
            made.append(slab)
            with torch.no_grad():
                for parameter, place in zip(group, views, strict=True):
                    parameter.data = place.copy_(parameter)
                    done += place.nbytes
            step(done, total)
    finally:
        client.slabs.keep_for(model, made)


def require(name: str) -> Any:
    """An optional package. Raises ConfigError with the extra to install."""
    try:
        return __import__(name)
    except ModuleNotFoundError as err:
        if err.name == name:
            raise ConfigError(f"this needs {name}: pip install 'rpruntime[hf]'") from err
        raise ConfigError(f"{name} is installed, but lacks {err.name}: pip install {err.name}") from err
    except ImportError as err:
        raise ConfigError(f"{name} is installed, but cannot be imported: {err}") from err


def _warn_of_missing(name: Any, missing: Iterable[str]) -> None:
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn(f"{name} has no weights for {', '.join(names[:3])}{more}: these begin with random values")


# --- what to load


def _config(transformers: Any, name: Any, hub: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = kwargs.pop("config", None)
    model_kwargs: dict[str, Any] = {
        k: kwargs.pop(k) for k in ("attn_implementation", "experts_implementation") if k in kwargs
    }
    trust = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
    if given is not None:
        config, unused = given, {k: v for k, v in kwargs.items() if k != "trust_remote_code"}
    else:
        with explained(name, transformers):
            config, unused = transformers.AutoConfig.from_pretrained(name, return_unused_kwargs=True, **hub, **kwargs)
        unused.pop("trust_remote_code", None)
    if unused:
        raise ConfigError(f"from_pretrained does not know {', '.join(sorted(unused))}, nor does the configuration")
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"{name} is quantised, which cannot be trained here: load a checkpoint in bfloat16, float16 or float32"
        )
    return config, {**model_kwargs, **trust}


def _folder_of(name: str | os.PathLike[str], hub: dict[str, Any]) -> Path:
    if os.path.isdir(name):
        return Path(name)
    kept = {key: value for key, value in hub.items() if key != "proxies"}
    return Path(require("huggingface_hub").snapshot_download(str(name), allow_patterns=_FILES, **kept))


def _dtype(dtype: Any, config: Any, entries: dict[str, shards.Entry] | None) -> torch.dtype | None:
    if dtype not in (None, "auto"):
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ConfigError(f"dtype must be a floating torch dtype such as torch.bfloat16, not {dtype!r}")
        return found
    found = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found)
    if found is None and entries is not None:
        found = next((entry.dtype for entry in entries.values() if entry.dtype.is_floating_point), None)
    return found


def without_memory(transformers: Any, config: Any, dtype: torch.dtype | None, kwargs: dict[str, Any]) -> nn.Module:
    """The model with parameters on the meta device and real buffers, those that no checkpoint holds included."""
    more = {} if dtype is None else {"dtype": dtype}
    with _parameters_on_meta():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **more, **kwargs)
    return model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register: Any = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            kept = dict(param.__dict__)
            param = type(param)(param.data.to("meta"), requires_grad=param.requires_grad)
            param.__dict__.update(kept)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _sources(model: nn.Module, entries: dict[str, shards.Entry]) -> dict[str, shards.Entry] | None:
    """Name -> where its bytes are, one name for each parameter and buffer; None: transformers has to convert."""
    if any(module._load_state_dict_pre_hooks for module in model.modules()) or _is_converted(model, entries):
        return None
    state = model.state_dict(keep_vars=True)
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    if any(name not in state and not any(re.search(p, name) for p in ignored) for name in entries):
        return None
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    found = {}
    for aliases in names.values():
        there = [name for name in aliases if name in entries]
        if not there or any(entries[name].shape != tuple(state[name].shape) for name in there):
            return None
        if any(not _equal(entries[there[0]], entries[name]) for name in there[1:]):
            return None  # tied in the configuration, not in the checkpoint
        found[there[0]] = entries[there[0]]
    return found


def _is_converted(model: Any, names: Iterable[str]) -> bool:
    """Whether transformers (from version 5 on) would change any of these weights while loading."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return bool(getattr(model, "_checkpoint_conversion_mapping", None))
    patterns = [
        pattern.replace(".*.", r"\..*\.")
        for conversion in get_model_conversion_mapping(model)
        for pattern in conversion.source_patterns
    ]
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _equal(first: shards.Entry, second: shards.Entry) -> bool:
    if first == second or first.shape != second.shape:
        return first == second
    values = [torch.empty(entry.shape, dtype=entry.dtype) for entry in (first, second)]
    for entry, value in zip((first, second), values, strict=True):
        entry.read_into(value)
    return torch.equal(*values)


# --- into slabs


def _groups(layers: Sequence[tuple[str, nn.Module]]) -> list[list[nn.Parameter]]:
    """Parameters that lie together, in the order of a pipe's units: those of each layer, and each shared one alone."""
    positions: dict[int, int] = {}
    of_layer = [list(dict.fromkeys(layer.parameters())) for _, layer in layers]
    for parameters in of_layer:
        for parameter in parameters:
            positions[id(parameter)] = positions.get(id(parameter), 0) + 1
    groups = [[p for p in parameters if positions[id(p)] == 1] for parameters in of_layer]
    shared = {id(p): p for parameters in of_layer for p in parameters if positions[id(p)] > 1}
    return [group for group in groups if group] + [[parameter] for parameter in shared.values()]


def _slab(
    client: Client, group: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[Slab, list[torch.Tensor]]:
    """A slab for these tensors, and its views in their shapes."""
    shapes, kinds = [tuple(p.shape) for p in group], [dtype_name(dtype) for dtype in dtypes]
    offsets, nbytes = packed(shapes, kinds)
    slab = client.slabs.make(nbytes)
    places = zip(offsets, shapes, kinds, strict=True)
    return slab, [view(slab.memory, offset, shape, kind) for offset, shape, kind in places]


def _fill(
    client: Client, model: nn.Module, sources: dict[str, shards.Entry], dtype: torch.dtype | None, bar: Bar
) -> None:
    """Give every parameter its place in a slab and read its bytes."""
    state = model.state_dict(keep_vars=True)
    entry_of = {id(state[name]): entry for name, entry in sources.items()}
    groups = _groups(layers_of(model, check=False))
    placed = {id(p) for group in groups for p in group}
    groups += [[p] for p in dict.fromkeys(model.parameters()) if id(p) not in placed]
    wide = _kept_in_fp32(model, dtype)
    kinds = {id(p): torch.float32 if id(p) in wide else p.dtype for group in groups for p in group}
    total = sum(tensor_bytes(tuple(p.shape), dtype_name(kinds[id(p)])) for group in groups for p in group)
    override = client.session.config.get("host_memory")
    check_host_memory(total, read_host_memory(), override_gib=override, what="the model's weights")
    made: list[Slab] = []
    new: dict[int, nn.Parameter] = {}
    done = 0
    try:
        for group in groups:
            slab, views = _slab(client, group, [kinds[id(p)] for p in group])
            made.append(slab)
            for old, place in zip(group, views, strict=True):
                entry_of[id(old)].read_into(place)
                new[id(old)] = type(old)(place, requires_grad=old.requires_grad)
                new[id(old)].__dict__.update(old.__dict__)
                done += place.nbytes
                bar.update(done, total)
        for buffer in (b for b in model.buffers() if id(b) in entry_of):
            entry_of[id(buffer)].read_into(buffer)
    except BaseException:
        client.slabs.release(made)
        raise
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = new[id(parameter)]
    client.slabs.keep_for(model, made)


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype | None) -> set[int]:
    """Parameters that transformers keeps in fp32 in a model of that dtype."""
    parts = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        parts |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not parts:
        return set()
    pattern = re.compile("|".join(rf"(^|\.){re.escape(part)}(\.|$)" for part in parts))
    return {id(p) for name, p in model.named_parameters() if pattern.search(name) and p.is_floating_point()}


def _finish(transformers: Any, model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").exists() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.eval()
