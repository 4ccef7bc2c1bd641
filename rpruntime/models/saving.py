"""`pipe.save_pretrained`: a folder that transformers (or peft, for adapters) loads back equal.

Tensors are written one at a time from where they lie. A merged weight, or one that transformers keeps in another form
on disk (experts that it fuses while loading), is made when its turn comes and dropped after it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import fnmatch
import functools
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rpruntime.checkpoints.files import sync_folder
from rpruntime.errors import ConfigError
from rpruntime.models import shards
from rpruntime.models.parts import is_transformers, unwrapped

MAX_SHARD_BYTES = 5_000_000_000
_MODEL_FILES = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*", "adapter_*")
_ADAPTER_FILES = ("adapter_*",)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a causal LM, or the adapters of one, into `folder`; all of it or nothing.

    Args:
        model: a transformers model or a peft model around one, its weights up to date.
        folder: is made, or replaced; other files in it (a tokenizer's) stay.
        dtype: floating parameters are cast to it (default: as they are).
        merge_adapters: write the full model with the adapters in its weights, instead of the adapters alone.
        max_shard_bytes: a larger model is several files.

    Raises:
        ConfigError: it is no such model.
    """
    if not is_transformers(unwrapped(model)):
        raise ConfigError(
            f"save_pretrained is for models of transformers; for a {type(model).__name__} use "
            "torch.save(model.state_dict(), file) after pipe.synchronize()"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a floating torch dtype such as torch.bfloat16, not {dtype!r}")
    base: Any = unwrapped(model)
    adapted = base is not model or getattr(base, "_hf_peft_config_loaded", False)
    if not adapted and any(_peft_kind(module) == "tuner" for module in base.modules()):
        raise ConfigError(
            "the model has adapters inside, but is not the peft model around them, which knows how to save them: give "
            "RoundPipe what get_peft_model returned"
        )
    if merge_adapters and not adapted:
        raise ConfigError("merge_adapters=True, but the model has no adapters")
    if adapted and not merge_adapters:
        with replaced(Path(folder), _ADAPTER_FILES) as new:
            _save_adapters(model, new, dtype)
    else:
        with replaced(Path(folder), _MODEL_FILES) as new:
            _save_model(base, new, dtype, max_shard_bytes)


def _save_adapters(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    model.save_pretrained(folder)
    if dtype is not None:  # of what peft has chosen: the base's weights are many, and not among it
        for file in folder.rglob("adapter_model*.safetensors"):
            shards.cast_file(file, dtype)


def _save_model(model: Any, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    config = copy.deepcopy(model.config)
    tensors = _untied(model, config, list(_tensors(model)))
    if dtype is not None:
        tensors = [t.cast(dtype) for t in tensors]
    main = dtype or next((t.row.dtype for t in tensors if t.is_parameter and t.row.dtype.is_floating_point), None)
    if main is not None:
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", main)
    config.architectures = [type(model).__name__]
    shards.write(folder, _as_on_disk(model, [t.row for t in tensors]), max_shard_bytes=max_shard_bytes)
    config.save_pretrained(folder)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


# --- the tensors of a model


@dataclass(frozen=True)
class _Tensor:
    """`identity`: equal for two names of one tensor."""

    row: shards.Row
    identity: int
    is_parameter: bool

    def cast(self, dtype: torch.dtype) -> _Tensor:
        if not self.is_parameter or not self.row.dtype.is_floating_point:
            return self
        return replace(self, row=replace(self.row, dtype=dtype))


def _tensors(module: Any, prefix: str = "", merged: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Every parameter and saved buffer, adapters merged, under the names of the model without adapters."""
    kind = _peft_kind(module)
    if kind == "tuner":
        yield from _tensors(_inner(module), prefix, _Merged(module))
        return
    if kind == "trained":
        adapter = module.active_adapter
        name = adapter if isinstance(adapter, str) else adapter[0]
        yield from _tensors(module.modules_to_save[name], prefix)
        return
    if kind == "tokens":
        yield from _tensors(module.token_adapter, prefix)
        return
    buffers = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
    for name, tensor in [*module._parameters.items(), *buffers.items()]:
        if tensor is None:
            continue
        is_parameter = name in module._parameters
        make: Callable[[], torch.Tensor] = tensor.detach
        identity = id(tensor)
        if merged is not None and is_parameter:
            make = functools.partial(merged, name)
            identity = id(make)
        yield _Tensor(shards.Row(prefix + name, tuple(tensor.shape), tensor.dtype, make), identity, is_parameter)
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.")


def _peft_kind(module: nn.Module) -> str:
    if not any(c.__module__.split(".")[0] == "peft" for c in type(module).__mro__):
        return ""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        return "tuner"
    if isinstance(module, ModulesToSaveWrapper):
        return "trained"
    return "tokens" if hasattr(module, "token_adapter") else ""


def _inner(tuner: Any) -> nn.Module:
    """The module without any adapter around it."""
    while _peft_kind(tuner) == "tuner":
        tuner = tuner.base_layer
    found: nn.Module = tuner
    return found


class _Merged:
    """Gives a layer's parameters with its adapters merged into them, from a copy that lives while they are written."""

    def __init__(self, tuner: nn.Module) -> None:
        self._tuner = tuner

    def __call__(self, name: str) -> torch.Tensor:
        copied: Any = copy.deepcopy(self._tuner)
        chain = [copied]
        while _peft_kind(chain[-1].base_layer) == "tuner":
            chain.append(chain[-1].base_layer)
        with torch.no_grad():
            for layer in reversed(chain):
                if not layer.disable_adapters:
                    layer.merge()
        found = chain[-1].base_layer._parameters[name]
        assert found is not None
        return found.detach()


def _untied(model: Any, config: Any, tensors: list[_Tensor]) -> list[_Tensor]:
    """One name of each tied tensor, where loading ties it again; `config` says so no more where it is split."""
    names: dict[int, list[str]] = {}
    for tensor in tensors:
        names.setdefault(tensor.identity, []).append(tensor.row.name)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(text, "tie_word_embeddings", False):
        return tensors
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    sources = set(tied.values()) if isinstance(tied, dict) else set()
    targets = [t.row.name for t in tensors if any(re.search(rf"^{pattern}$", t.row.name) for pattern in tied)]
    dropped = set()
    for aliases in names.values():
        wanted = [name for name in aliases if name in sources or name not in targets] or aliases[:1]
        if len(aliases) > 1:
            dropped |= {name for name in aliases if name in targets and name != wanted[0]}
    if any(name not in dropped for name in targets):
        text.tie_word_embeddings = config.tie_word_embeddings = False
    return [t for t in tensors if t.row.name not in dropped]


# --- names and forms on disk


def _as_on_disk(model: Any, rows: list[shards.Row]) -> list[shards.Row]:
    """The tensors in the form in which transformers (from version 5 on) keeps them in files; block by block, so that
    one block is held at a time."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return rows
    blocks: dict[str, list[shards.Row]] = {}
    for row in rows:
        found = re.match(r".*?\.\d+\.", row.name)
        blocks.setdefault(found[0] if found else row.name, []).append(row)
    result: list[shards.Row] = []
    for block in blocks.values():
        outline = {row.name: torch.empty(row.shape, dtype=row.dtype, device="meta") for row in block}
        reverted = revert_weight_conversion(model, dict(outline))
        if reverted.keys() == outline.keys():
            result += block
            continue
        cache = _Block(lambda state: revert_weight_conversion(model, state), block)
        result += [
            shards.Row(name, tuple(t.shape), t.dtype, functools.partial(cache.get, name))
            for name, t in reverted.items()
        ]
    return result


class _Block:
    """The tensors of one block in another form, made at the first one's turn and dropped after the last one's."""

    def __init__(self, revert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], rows: list[shards.Row]):
        self._revert = revert
        self._rows = rows
        self._made: dict[str, torch.Tensor] = {}

    def get(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made = dict(self._revert({row.name: row.make().detach().to(row.dtype) for row in self._rows}))
        return self._made.pop(name)


# --- all or nothing


@contextlib.contextmanager
def replaced(folder: Path, stale: tuple[str, ...]) -> Iterator[Path]:
    """A new folder to be filled, which takes the place of `folder` at the end of the block, if nothing is raised.

    What is in the old folder and not in the new one goes along, except files that match `stale`.
    """
    folder = folder.resolve()  # of a link, what it names is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder")
    new = folder.parent / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}"
    new.mkdir()
    try:
        yield new
        if folder.exists():
            for path in folder.iterdir():
                if not (new / path.name).exists() and not any(fnmatch.fnmatch(path.name, p) for p in stale):
                    _link(path, new / path.name)
            shutil.copystat(folder, new)
        sync_folder(new)
        _exchange(new, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # what it was, or what the old folder has become


def _link(path: Path, target: Path) -> None:
    def link(source: Any, to: Any) -> Any:
        try:
            os.link(source, to, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, to, follow_symlinks=False)
        return to

    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, target, symlinks=True, copy_function=link)
    else:
        link(path, target)


def _exchange(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`, in one step where the file system has it."""
    if not folder.exists():
        new.rename(folder)
        return
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(new), os.fsencode(folder)
    if renameat2 is not None and renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    old = new.with_name(new.name + ".old")
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
