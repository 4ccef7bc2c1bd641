"""The script's model while it is loaded: that it is still the one the processes know, and that nobody takes its
parameters for the newest weights when they are not."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from rpruntime.errors import ConfigError
from rpruntime.models.parts import is_causal_lm, unwrapped
from rpruntime.terminal import warn

if TYPE_CHECKING:
    from rpruntime.model import Model

_ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters")
"""Attributes of peft's modules that decide which adapters count."""


class ScriptModel:
    """Of one loaded model. Processes have the modules as they were when this was made."""

    def __init__(self, model: Model) -> None:
        root = model.module
        self._optimized = {
            id(p) for group in (model.optimizer.param_groups if model.optimizer else ()) for p in group["params"]
        }
        self._tree = [(m, tuple(m._modules.values()), tuple(m._parameters.values())) for m in root.modules()]
        dicts = [each for module, _, _ in self._tree for each in (module._modules, module._parameters)]
        self._parts = [(each, [*map(id, each.values())]) for each in dicts]
        """Children and parameters of each module: the dict, and ids of what was in it; `_tree` keeps that alive."""
        self._names = {id(part): name for name, part in [*root.named_modules(), *root.named_parameters()]}
        self._trains = [(p, p.requires_grad) for p in model.layout.parameters.values()]
        self._adapters = [(m, _adapter_state(m)) for m, _, _ in self._tree if "_disable_adapters" in vars(m)]
        readers = {id(m): m for m in (root, unwrapped(root) if is_causal_lm(root) else root)}.values()
        hook = Reading(model)
        self._handles = [
            handle
            for module in readers
            for handle in (module.register_forward_pre_hook(hook), module.register_state_dict_pre_hook(hook))
        ]

    def check(self) -> None:
        """Raises ConfigError if a module, a parameter or the choice of adapters has changed."""
        if any([*map(id, now.values())] != then for now, then in self._parts):
            raise ConfigError(self._what_changed() + _REMEDY)
        for module, state in self._adapters:
            if _adapter_state(module) != state:
                raise ConfigError(
                    f"adapters of {self._names[id(module)]} were switched, merged or disabled after RoundPipe wrapped "
                    "the model, which has no effect on the processes that run it: put them back, or close the pipe, "
                    "switch, and make a new RoundPipe"
                )

    def check_training(self) -> None:
        """Raises ConfigError if a parameter was frozen, or one of the optimizer's thawed."""
        for parameter, trains in self._trains:
            if parameter.requires_grad != trains and (trains or id(parameter) in self._optimized):
                self.check()  # what peft does, it does to both
                raise ConfigError(
                    f"requires_grad of {self._names[id(parameter)]} is {parameter.requires_grad} now and was {trains} "
                    "when RoundPipe wrapped the model, which is what counts: set it back, or close the pipe, set "
                    "it, and make a new RoundPipe (with a new optimizer)"
                )

    def release(self) -> None:
        """The model is not loaded any more."""
        for handle in self._handles:
            handle.remove()

    def _what_changed(self) -> str:
        for module, children, parameters in self._tree:
            where = self._names[id(module)]
            for now, then in ((module._modules, children), (module._parameters, parameters)):
                for old, (name, new) in zip(then, now.items(), strict=False):
                    if new is not old:
                        name = f"{where}.{name}" if where else name
                        kinds = f"({_kind(old)} then, {_kind(new)} now)"
                        return f"{name} was replaced after RoundPipe wrapped the model {kinds}"
                if len(now) != len(then):
                    return f"{where or 'the model'} has more or fewer parts than when RoundPipe wrapped the model"
        return "a part of the model was replaced after RoundPipe wrapped it"


_REMEDY = (
    ": the processes keep the model as it was. Change it first (peft.get_peft_model, resize_token_embeddings...), then "
    "make the optimizer, then RoundPipe"
)


class Reading:
    """A hook of the script's model: warns, once, who runs, saves or copies it while its parameters are older weights.

    A copy of the model has one that says nothing.
    """

    of_rpruntime = True
    """Not one of the user's hooks, which are refused (`has_hooks`)."""

    def __init__(self, model: Model | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._said = False

    def __call__(self, *_: Any) -> None:
        self._warn()

    def __reduce__(self) -> Any:
        self._warn()
        return Reading, ()

    def _warn(self) -> None:
        model = None if self._model is None else self._model()
        if model is None or self._said or not model.weights.stale:
            return
        self._said = True
        warn(
            "the model's parameters are older weights than those that pipe.step() has made, perhaps of several steps: "
            "call pipe.synchronize() before model(...), model.generate, model.state_dict() or a copy of the model, or "
            "use pipe.forward, pipe.generate, pipe.save_pretrained, which take the newest"
        )


def _adapter_state(module: nn.Module) -> tuple[Any, ...]:
    values = (vars(module).get(name) for name in _ADAPTER_STATE)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _kind(part: Any) -> str:
    name = type(part).__name__
    inner = getattr(part, "base_layer", None)
    return f"a {name} around it" if isinstance(inner, nn.Module) else f"a {name}"
