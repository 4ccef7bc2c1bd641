"""What only a script knows of its model, in files of the session's folder, for the script that goes on with it.

    FOLDER/model-N.pickle        the module, the optimizer and the settings, as they were when the model was loaded
    FOLDER/model-N.PART.pickle   "pipe": settings of its RoundPipe; "user_state"; "left": what a detachment left open

Mode 0600, in a folder of mode 0700, replaced as a whole. Parameters are not in them: their values are in the session.
"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from rpruntime.errors import ConfigError, RoundPipeError
from rpruntime.preparing import Prepared
from rpruntime.private_files import write_private
from rpruntime.store.arena import dtype_of
from rpruntime.store.values import put_together, take_apart, why_not_picklable


def _path(folder: Path, number: int, part: str = "") -> Path:
    return folder / (f"model-{number}.{part}.pickle" if part else f"model-{number}.pickle")


def save_model(folder: Path, number: int, prepared: Prepared) -> None:
    """Write down a model that is being loaded.

    Raises:
        ConfigError: something of it does not pickle; names it.
    """
    places = prepared.layout.place_of()
    try:
        skeleton, tensors = take_apart(prepared)
    except Exception as err:
        raise ConfigError(
            f"{why_not_picklable(prepared, 'model')}; it cannot outlive this script in a served session"
        ) from err
    entries = [
        ("param", *places[id(tensor)], tensor.requires_grad) if id(tensor) in places else ("value", tensor.detach())
        for tensor in tensors
    ]
    write_private(_path(folder, number), pickle.dumps({"skeleton": skeleton, "tensors": entries}))


def load_model(folder: Path, number: int) -> Prepared:
    """The model with parameters that show nothing yet.

    Raises:
        RoundPipeError: its record is gone or does not load; says why.
    """
    try:
        record = pickle.loads(_path(folder, number).read_bytes())
        specs = _ParamStandIns(record["tensors"])
        found = put_together(record["skeleton"], specs.tensors)
    except Exception as err:
        raise RoundPipeError(
            f"the record of model {number} in {folder} does not load ({type(err).__name__}: {err}); the modules that "
            "define the model have to be importable here too"
        ) from err
    assert isinstance(found, Prepared)
    specs.fit(found)
    return found


class _ParamStandIns:
    def __init__(self, entries: list[tuple[Any, ...]]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._params: dict[tuple[int, int], torch.nn.Parameter] = {}
        for kind, *rest in entries:
            if kind == "param":
                unit, index, requires_grad = rest
                parameter = torch.nn.Parameter(torch.empty(0), requires_grad=requires_grad)
                self._params[unit, index] = parameter
                self.tensors.append(parameter)
            else:
                self.tensors.append(rest[0])

    def fit(self, prepared: Prepared) -> None:
        """Shapes and dtypes, of which nothing is filled in."""
        for (unit, index), parameter in self._params.items():
            spec = prepared.layout.units[unit].params[index]
            parameter.data = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))


def save_part(folder: Path, number: int, part: str, value: Any) -> None:
    """Write a part of a model's record. Raises what pickling it raises."""
    write_private(_path(folder, number, part), cloudpickle.dumps(value))


def load_part(folder: Path, number: int, part: str, default: Any) -> Any:
    """A part of a model's record; `default`: there is none."""
    try:
        data = _path(folder, number, part).read_bytes()
    except OSError:
        return default
    return pickle.loads(data)


def remove(folder: Path, number: int) -> None:
    """The model is no more."""
    for path in (_path(folder, number), *folder.glob(f"model-{number}.*.pickle")):
        path.unlink(missing_ok=True)


@dataclasses.dataclass
class Left:
    """What a detachment leaves of a model at a version: finished calls with their losses and scales, and the groups'
    values."""

    version: int
    calls: list[tuple[Any, float]]
    groups: list[dict[str, Any]]
