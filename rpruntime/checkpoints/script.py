"""What of a checkpoint only the script has: registered objects, `extra`, hyper-parameters, random state."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch

from rpruntime.errors import CheckpointError, ConfigError
from rpruntime.store.values import why_not_picklable
from rpruntime.terminal import warn

if TYPE_CHECKING:
    from rpruntime.model import Model


class ScriptState:
    """The objects that the checkpoints of a model take along.

    Attributes:
        registered: schedulers, loaders and the like, in order.
    """

    def __init__(self, model: Model) -> None:
        self.registered: list[Any] = []
        self._model = model
        self._warned = False

    def register(self, objects: tuple[Any, ...]) -> None:
        """Take these objects along from now on."""
        for thing in objects:
            if not all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ConfigError(f"a {type(thing).__name__} has no state_dict and load_state_dict to be saved with")
            if thing is self._model.module or thing is self._model.optimizer:
                raise ConfigError("the model and the optimizer are in every checkpoint already: register other objects")
            if not any(thing is known for known in self.registered):
                self.registered.append(thing)

    def warn_scheduler(self) -> None:
        """Tell the user, once, of a scheduler that would begin again."""
        optimizer = self._model.optimizer
        if optimizer is None or self._warned:
            return
        scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        if scheduled and not any(getattr(thing, "optimizer", None) is optimizer for thing in self.registered):
            self._warned = True
            warn(
                "a learning-rate scheduler drives the optimizer and is not in the checkpoint: a resumed run would "
                "begin its schedule again; call pipe.register_for_checkpointing(scheduler)",
            )

    def pack(self, extra: Any) -> bytes:
        """All of it as it is now. Raises CheckpointError: something cannot be pickled; names it."""
        optimizer = self._model.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        values = {
            "extra": extra,
            "registered": [(type(thing).__qualname__, thing.state_dict()) for thing in self.registered],
            "random": _random_state(),
            "groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
        }
        try:
            return to_bytes(values)
        except Exception as err:
            name = why_not_picklable(values["extra"], "extra")
            if name == "extra":
                name = why_not_picklable(values["registered"], "registered")
            raise CheckpointError(f"{name}: {err}; it cannot be saved") from err

    def check(self, path: Path, kinds: list[str]) -> None:
        """Whether objects of these classes are registered. Raises CheckpointError: they are not."""
        mine = [type(thing).__qualname__ for thing in self.registered]
        if self._model.optimizer is None and not mine:
            return  # it takes weights and buffers alone
        if mine != kinds:
            raise CheckpointError(
                f"{path} was saved with these registered objects: {', '.join(kinds) or 'none'}; here are "
                f"{', '.join(mine) or 'none'}: call pipe.register_for_checkpointing with the same, in the same order"
            )

    def load(self, path: Path, states: list[Any]) -> None:
        """Give the registered objects their states. Raises CheckpointError: all are as they were."""
        if not self.registered:
            return
        before = [_from_bytes(to_bytes(thing.state_dict())) for thing in self.registered]
        try:
            for thing, state in zip(self.registered, states, strict=True):
                thing.load_state_dict(state)
        except BaseException as err:
            for thing, state in zip(self.registered, before, strict=True):
                thing.load_state_dict(state)
            if not isinstance(err, Exception):
                raise
            raise CheckpointError(
                f"a registered {type(thing).__name__} does not take its state from {path}: {type(err).__name__}: {err}"
            ) from err

    def load_rest(self, script: dict[str, Any]) -> None:
        """Take over hyper-parameters and random state."""
        optimizer = self._model.optimizer
        for group, saved in zip(optimizer.param_groups if optimizer else (), script["groups"], strict=False):
            for name, value in saved.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
        _set_random_state(script["random"])


def to_bytes(value: Any) -> bytes:
    """Any value that cloudpickle takes, tensors as torch saves them."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=cloudpickle)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
