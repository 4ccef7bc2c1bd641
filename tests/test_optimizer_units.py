"""What the optimizer process keeps of the user's optimizer: its state's memory, its own hyper-parameters, clipping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rpruntime as rp
from rpruntime.optimizer.steps import clip_factor
from rpruntime.optimizer.units import SHARED_STATE_BYTES, use_fast_kernel
from tests.reference import PausedSession, inline, live_bytes

LARGE = SHARED_STATE_BYTES // 4


@pytest.fixture
def session() -> Iterator[PausedSession]:
    with inline() as session:
        yield session


class Scale(nn.Module):
    """x * weight, with as many weights as asked for."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Custom(torch.optim.Optimizer):
    """Base of the optimizers below: SGD whose state is up to `remember`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.remember(self.state[param], param.grad), alpha=group["lr"])
            group["k"] += 1

    def remember(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        return grad


class Replaces(Custom):
    """Momentum whose buffer is a new tensor each step."""

    def remember(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        state["momentum"] = state.get("momentum", torch.zeros_like(grad)) * 0.5 + grad
        return state["momentum"]


class Swaps(Custom):
    """Two buffers that change their names each step."""

    def remember(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        old, new = state.get("new", torch.zeros_like(grad)), state.get("old", torch.ones_like(grad))
        state["old"], state["new"] = old, new
        return new.add_(grad)


class Reshapes(Custom):
    """State that changes its size, becomes small and goes."""

    def remember(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        count = state["count"] = state.get("count", 0) + 1
        state["history"] = grad.expand(count, -1).clone() if count < 3 else grad[:2].clone()
        if count > 3:
            del state["history"]
        return grad


class KeepsGradient(Custom):
    """Steps with the difference to the last gradient, which it keeps as it got it."""

    def remember(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        change = grad - state["last"] if "last" in state else grad.clone()
        state["last"] = grad
        return change


class Counts(Custom):
    """Steps by the number of steps, which it keeps in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * group["k"])


def mse(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).abs().square().mean()


def train(
    session: PausedSession,
    kind: Any,
    model: nn.Sequential,
    lrs: list[float],
    *,
    tolerance: float = 1e-6,
    max_grad_norm: float | None = None,
    calls: int = 1,
) -> list[dict[str, int]]:
    """Train as plainly as in a loop and compare; returns the bytes in use after each step."""
    twin = nn.Sequential(*(Scale(layer.weight.numel(), layer.weight.dtype) for layer in model))  # type: ignore
    plain = kind(twin.parameters(), lr=lrs[0])
    optimizer = kind(model.parameters(), lr=lrs[0])
    size, dtype = model[0].weight.numel(), model[0].weight.dtype
    used = []
    with rp.RoundPipe(model, optimizer, loss_fn=mse, num_microbatches=1, session=session) as pipe:
        for number, lr in enumerate(lrs):
            optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = lr
            plain.zero_grad()
            for call in range(calls):
                torch.manual_seed(10 * number + call)
                x, y = torch.randn(2, size, dtype=dtype), torch.randn(2, size, dtype=dtype)
                pipe.forward_backward(x, y)
                mse(twin(x), y).backward()
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(twin.parameters(), max_grad_norm)
            pipe.step(max_grad_norm=max_grad_norm).result()
            plain.step()
            pipe.synchronize()
            used.append(live_bytes(session))
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=tolerance, atol=tolerance)
    return used


@pytest.mark.parametrize("kind", [Replaces, Swaps, Reshapes, KeepsGradient])
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("calls", [1, 2])
def test_state_may_be_replaced_by_other_tensors(session: PausedSession, kind: Any, size: int, calls: int) -> None:
    model = nn.Sequential(Scale(size), Scale(size))
    used = train(session, kind, model, [0.1] * 6, calls=calls)
    assert used[4] == used[5]


def test_hyper_parameters_that_the_optimizer_changes_are_kept(session: PausedSession) -> None:
    train(session, Counts, nn.Sequential(Scale(3), Scale(3)), [0.1, 0.1, 0.05, 0.05, 0.1])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_complex_parameters_are_stepped(session: PausedSession, kind: Any) -> None:
    train(session, kind, nn.Sequential(Scale(3, torch.complex64)), [0.1] * 3, tolerance=1e-5)


def test_only_real_parameters_get_the_fused_kernel() -> None:
    def group(*dtypes: torch.dtype) -> dict[str, Any]:
        return {"params": [nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in dtypes], "fused": None}

    assert use_fast_kernel(torch.optim.SGD, group(torch.float32, torch.float64))["fused"] is True
    assert use_fast_kernel(torch.optim.SGD, group(torch.float32, torch.complex64))["fused"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 2.0, 3.1415926, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("limit", [0.3, 1.0, 1e-3, 1e300])
def test_clip_factor_is_that_of_torch(dtype: torch.dtype, norm: float, limit: float) -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=dtype))
    parameter.grad = torch.full((1,), norm, dtype=dtype)
    measured = torch.linalg.vector_norm(parameter.grad).item()
    wanted = torch.clamp(limit / (torch.tensor(measured, dtype=dtype) + 1e-6), max=1.0).item()
    torch.testing.assert_close(
        clip_factor(limit, measured, single=dtype == torch.float32), wanted, rtol=0, atol=0, equal_nan=True
    )


def test_a_double_norm_that_fits_in_single_is_clipped_in_double(session: PausedSession) -> None:
    train(session, torch.optim.SGD, nn.Sequential(Scale(1, torch.float64)), [0.1] * 3, tolerance=0, max_grad_norm=0.3)
    assert clip_factor(0.3, 2.0, single=False) != clip_factor(0.3, 2.0, single=True)
