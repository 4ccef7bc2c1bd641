"""What calls return: values that are not here yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rpruntime.client import Client


class _Pending:
    """A result that arrives, or an error that is raised instead."""

    def __init__(self, client: Client, what: str) -> None:
        self._client = client
        self._what = what
        self._value: Any = None
        self._finished = False
        self._error: Callable[[], BaseException] | None = None

    def _finish(self, value: Any) -> None:
        self._value, self._finished = value, True

    def _cancel(self, error: Callable[[], BaseException]) -> None:
        self._error, self._finished = error, True

    def done(self) -> bool:
        """Whether waiting would return at once."""
        return self._finished

    def _wait(self, timeout: float | None = None) -> Any:
        if not self._finished and not self._client.wait(lambda: self._finished, self._what, timeout):
            raise TimeoutError(f"{self._what} did not finish within {timeout} s")
        if self._error is not None:
            raise self._error()
        return self._value


class Loss(_Pending):
    """The loss of one `forward_backward`: the fp32 sum, in order, of its micro-batches' shares (docs/numerics.md).

    `float(loss)`, `loss.item()`, formatting and `loss.tensor()` wait for it. It carries no graph; the backward has been
    queued with it.
    """

    def __float__(self) -> float:
        return float(self._wait())

    def item(self) -> float:
        """The value."""
        return float(self)

    def tensor(self) -> torch.Tensor:
        """The value as an fp32 scalar tensor."""
        return torch.tensor(float(self), dtype=torch.float32)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __str__(self) -> str:
        return str(float(self))

    def __repr__(self) -> str:
        return f"Loss({float(self)})" if self._finished and self._error is None else "Loss(running)"

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the gradients are being computed already."""
        raise TypeError("forward_backward has queued the backward already: remove loss.backward()")


class StepInfo(_Pending):
    """One `step()`. The fields wait for it: `step`, `loss` (sum over the calls of loss * scale), `grad_norm` (before
    clipping; None without `max_grad_norm`), `skipped`, `lr` (of each group), `loss_scale`, `seconds`, `metrics`."""

    def result(self, timeout: float | None = None) -> StepInfo:
        """Wait for the step; returns self. Raises TimeoutError after `timeout` seconds."""
        self._wait(timeout)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        fields = self._wait()
        if name not in fields:
            raise AttributeError(f"StepInfo has no field {name!r}; it has {', '.join(fields)}")
        return fields[name]

    def __repr__(self) -> str:
        if not self._finished or self._error is not None:
            return "StepInfo(running)"
        return "StepInfo(" + ", ".join(f"{key}={value!r}" for key, value in self._value.items()) + ")"


class EvalResult:
    """What `evaluate` returns: weighted `loss`, `num_items` (sum of weights, rows by default), averaged `metrics`."""

    def __init__(self, loss: float, num_items: float, metrics: dict[str, float]) -> None:
        self.loss = loss
        self.num_items = num_items
        self.metrics = metrics

    def __repr__(self) -> str:
        return f"EvalResult(loss={self.loss:.6g}, num_items={self.num_items:g}, metrics={self.metrics})"
