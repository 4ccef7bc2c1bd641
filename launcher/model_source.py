"""The model that `rpctl plan MODEL` is about, on the meta device: shapes and dtypes, no memory.

FOLDER            with a config.json of transformers (its weights are not read)
MODULE:FACTORY    called without arguments under `torch.device("meta")`; returns an nn.Module
"""

from __future__ import annotations

import importlib
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from rpruntime.errors import ConfigError
from rpruntime.models.parts import is_causal_lm
from rpruntime.models.pretrained import require, without_memory

OPTIMIZERS = {
    name.lower(): getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
}


@dataclass(frozen=True)
class Source:
    """A model on the meta device and one whole batch for it.

    Attributes:
        inputs: int64 [batch, seq] for models that begin with an embedding, else floats.
        tokens: of the batch; None: its rows are no sequences of tokens.
    """

    model: nn.Module
    inputs: torch.Tensor
    tokens: int | None

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return int(self.inputs.shape[0])


def read_source(
    where: str, *, batch: int, seq: int, dtype: torch.dtype | None, shape: tuple[tuple[int, ...], torch.dtype] | None
) -> Source:
    """Build the model and a batch.

    Args:
        where: a folder, or "module:factory".
        batch: rows of a batch.
        seq: tokens of a row.
        dtype: in which the model is made, where it is one of transformers.
        shape: (shape, dtype) of a whole batch, where it is not to be guessed.

    Raises:
        ConfigError: there is no such model, or its inputs cannot be guessed.
    """
    model = _of_folder(Path(where), dtype) if Path(where).is_dir() else _of_factory(where)
    if shape is not None:
        size, kind = shape
        inputs = torch.empty(size, dtype=kind, device="meta")
        begins = _first_owner(model)
        if isinstance(begins, nn.Linear | nn.Conv1d | nn.Conv2d) and not kind.is_floating_point:
            raise ConfigError(f"--input of {kind}: the model begins with {type(begins).__name__}, which takes floats")
    else:
        inputs = _guessed_inputs(model, batch, seq)
    is_tokens = not inputs.is_floating_point() and inputs.dim() == 2
    return Source(model, inputs, inputs.numel() if is_tokens else None)


def _of_folder(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} has no config.json: give the folder of a model of transformers")
    transformers = require("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except Exception as err:
        raise ConfigError(f"{folder / 'config.json'} cannot be read: {str(err).strip().splitlines()[0]}") from err
    try:
        return without_memory(transformers, config, dtype, {}).to("meta").train()
    except ValueError as err:  # no causal LM
        raise ConfigError(f"{folder} is no causal LM: {str(err).strip().splitlines()[0]}") from err


def _of_factory(where: str) -> nn.Module:
    module_name, _, factory_name = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory: Any = importlib.import_module(module_name)
        for name in factory_name.split("."):
            factory = getattr(factory, name)
    except (ImportError, AttributeError, ValueError) as err:
        raise ConfigError(
            f"{where}: {err}; MODEL is a folder with config.json, or MODULE:FACTORY as seen from here"
        ) from err
    finally:
        sys.path.remove(str(Path.cwd()))
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigError(f"{where} is a {type(factory).__name__}: name a function that gives the model")
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as err:
        at = traceback.extract_tb(err.__traceback__)[-1]
        line = next(iter(str(err).strip().splitlines()), "")
        raise ConfigError(
            f"{where} raised {type(err).__name__}: {line} ({Path(at.filename).name}:{at.lineno}; it is called without "
            "arguments, and its tensors are on the meta device: they have no values)"
        ) from err
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{where} gives a {type(model).__name__}, not an nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise ConfigError(f"{where}: {lazy[0]} has no shape yet: use layers that are not lazy")
    if isinstance(model, nn.Sequential) and not len(model):
        raise ConfigError(f"{where} gives a model without layers")
    return model.to("meta")


def _first_owner(model: nn.Module) -> nn.Module | None:
    """The first module that has parameters of its own."""
    return next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)


def _guessed_inputs(model: nn.Module, batch: int, seq: int) -> torch.Tensor:
    if is_causal_lm(model):
        return torch.empty(batch, seq, dtype=torch.int64, device="meta")
    owner = _first_owner(model)
    if isinstance(owner, nn.Embedding):
        return torch.empty(batch, seq, dtype=torch.int64, device="meta")
    if isinstance(owner, nn.Linear):
        return torch.empty(batch, owner.in_features, dtype=torch.get_default_dtype(), device="meta")
    raise ConfigError(
        f"what goes into this model cannot be guessed (it begins with {type(owner).__name__}): say it with "
        "--input, for example --input 64,3,224,224 or --input 64,2048:int64"
    )
