"""What is wrong with a folder that is to be a model of transformers, in one sentence with the remedy.

`transformers` takes whatever is no folder for a name on the hub, so that a mistyped path ends in an error of the
network; and its messages about configurations list all models there are.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpruntime.errors import ConfigError

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SHOWN = 3
_SHOWN_CHARACTERS = 300


def check_model_folder(name: str | os.PathLike[str], *, has_config: bool = False) -> None:
    """Raises ConfigError for a path that does not lead to a model; what may be a name on the hub is let through.

    Args:
        name: as given to `from_pretrained`.
        has_config: a configuration was given, so that the folder needs none.
    """
    path = Path(name)
    if os.path.isdir(name) and os.fspath(name):
        if not has_config and not (path / "config.json").is_file():
            raise ConfigError(f"{path} {_instead_of_a_model(path)}")
        if not any((path / file).exists() for file in WEIGHT_FILES):
            others = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".gguf"))
            there = f"; there are {_some(others)}" if others else ""
            raise ConfigError(
                f"{path} has a configuration but no weights (model.safetensors, with its index if there are several, "
                f"or pytorch_model.bin){there}: was the download or the save interrupted?"
            )
    elif os.path.exists(name) and os.fspath(name):
        raise ConfigError(f"{path} is a file: give the folder that it is in, with config.json and the weights")
    elif _is_path(name):
        hint = "; ~ is not expanded here, os.path.expanduser does it" if os.fspath(name).startswith("~") else ""
        raise ConfigError(f"there is no folder {os.fspath(name)!r} (in {os.getcwd()}){hint}")


def _is_path(name: str | os.PathLike[str]) -> bool:
    """Whether it cannot be a name on the hub: those are "model" and "owner/model"."""
    text = os.fspath(name)
    return not isinstance(name, str) or not text or text[0] in "./~" or "\\" in text or text.count("/") > 1


def _instead_of_a_model(path: Path) -> str:
    """What a folder without a configuration is."""
    if (path / "adapter_config.json").is_file():
        base = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
        return (
            f"holds adapters of peft and no model: load the base, rp.from_pretrained({base or 'BASE'!r}), and then "
            f"peft.PeftModel.from_pretrained(model, {os.fspath(path)!r}, is_trainable=True)"
        )
    if (path / "checkpoint.json").is_file() or any(path.glob("step-*/checkpoint.json")):
        return (
            "holds checkpoints of rpruntime and no model of transformers: make the model and the pipe as before, then "
            f"pipe.load_checkpoint({os.fspath(path)!r}); pipe.save_pretrained writes a folder that can be loaded here"
        )
    inner = sorted(file.parent.name for file in path.glob("*/config.json"))
    if inner:
        return f"has no config.json, but {_some(inner)} in it has: give that folder"
    files = sorted(file.name for file in path.iterdir())
    found = f"only {_some(files)}" if files else "it is empty"
    return f"has no config.json ({found}): it is no model as save_pretrained writes it"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextlib.contextmanager
def explained(name: str | os.PathLike[str], transformers: Any) -> Iterator[None]:
    """Turns what transformers raises about a model in the block into a ConfigError that says it short."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as err:
        raise ConfigError(_explanation(name, transformers, err)) from err


def _explanation(name: str | os.PathLike[str], transformers: Any, err: Exception) -> str:
    text = str(err)
    version = f"transformers {transformers.__version__}"
    folder = Path(name)
    if "trust_remote_code" in text:
        return f"{name} brings code of its own: pass trust_remote_code=True if you trust it"
    if isinstance(err, ImportError):
        return f"{name} needs a package that is not installed: {_short(text)}"
    if not folder.is_dir():
        return (
            f"there is no folder {os.fspath(name)!r} (in {os.getcwd()}), and as a name on the hub it cannot be loaded: "
            f"{_short(text)}"
        )
    kind = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if "configuration class" in text:
        return (
            f"{name} is a {kind or 'model'}, which is no causal LM in {version}: only decoder-only language models can "
            "be loaded here"
        )
    if "model type" in text or "model_type" in text:
        if kind is None:
            return f"config.json of {name} has no model_type: it is not the configuration of a model of transformers"
        return f"{name} is a {kind!r}, which {version} does not know: a newer version may, or the name is mistyped"
    if "mismatched_sizes" in text:
        return f"the weights of {name} have other shapes than its config.json says: its files are of different models"
    return f"{version} cannot load {name}: {type(err).__name__}: {_short(text)}"


def _short(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return first if len(first) <= _SHOWN_CHARACTERS else f"{first[:_SHOWN_CHARACTERS]}..."
