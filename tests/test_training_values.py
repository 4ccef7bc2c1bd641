"""Cases from the field (numerics, models, data) with their right values.   pytest tests/test_training_values.py"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpruntime as rp
from rpruntime import ConfigError, ExecutionPlan
from tests.reference import PausedSession, Times, inline

pytestmark = pytest.mark.usefixtures("single_thread")


def identity(outputs: Tensor) -> Tensor:
    return outputs.mean()


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, fused=False, foreach=False)


def gradient(pipe: rp.RoundPipe) -> float:
    (value,) = pipe.gradients().values()
    return value.item()


# --- N1, N2, N3: sums


def test_four_calls_add_up(session: PausedSession) -> None:
    """N1 a: 1 + 2 + 4 + 8."""
    model = nn.Sequential(Times())
    with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=1, session=session) as pipe:
        for x in (1.0, 2.0, 4.0, 8.0):
            pipe.forward_backward(torch.tensor([x]))
        assert gradient(pipe) == 15
        pipe.step()
        pipe.synchronize()
        assert model[0].w.item() == 1 - 15


def test_mean_inside_a_call_and_sum_over_calls(session: PausedSession) -> None:
    """N1 b: (1 + 2) / 2 + (3 + 4) / 2; dividing the running sum again gives 4.25."""
    model = nn.Sequential(Times())
    with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=2, session=session) as pipe:
        losses = [pipe.forward_backward(torch.tensor(x)) for x in ([1.0, 2.0], [3.0, 4.0])]
        assert gradient(pipe) == 5.0
        info = pipe.step()
        assert [float(loss) for loss in losses] == [1.5, 3.5]
        assert info.loss == 5.0


def test_scale_makes_a_mean_over_calls(session: PausedSession) -> None:
    model = nn.Sequential(Times())
    with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=2, session=session) as pipe:
        losses = [pipe.forward_backward(torch.tensor(x), scale=0.5) for x in ([1.0, 2.0], [3.0, 4.0])]
        assert gradient(pipe) == 2.5
        info = pipe.step()
        assert [float(loss) for loss in losses] == [1.5, 3.5]  # never multiplied by scale
        assert info.loss == 2.5


def test_scale_multiplies_the_sum_and_not_the_loss(session: PausedSession) -> None:
    """(1 / 2 + 0.7 / 2) / 3, rounded in this order."""
    model = nn.Sequential(Times())
    with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=2, session=session) as pipe:
        pipe.forward_backward(torch.tensor([1.0, 0.7]), scale=1 / 3)
        wanted = (torch.tensor(0.5) + torch.tensor(0.7) / 2) * (1 / 3)
        assert gradient(pipe) == wanted.item()
        thirds = torch.tensor(1 / 2) * (1 / 3) + torch.tensor(0.7) / 2 * (1 / 3)
        assert wanted.item() != thirds.item()  # else this shows nothing


def masked_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean over the valid labels of each micro-batch; NaN if there is none, as in cross_entropy."""
    return outputs[labels != -100].mean()


def valid(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_token_mean_does_not_depend_on_the_cut(session: PausedSession, num_microbatches: int) -> None:
    """N2: one valid token of 4 and three of 1 make 7 / 4; the mean of means is 2.5."""
    x = torch.tensor([[4.0, 9.0], [9.0, 9.0], [1.0, 1.0], [1.0, 9.0]])
    labels = torch.tensor([[0, -100], [-100, -100], [0, 0], [0, -100]])
    model = nn.Sequential(Times())
    with rp.RoundPipe(
        model, sgd(model), loss_fn=masked_mean, loss_weight=valid, num_microbatches=num_microbatches, session=session
    ) as pipe:
        loss = pipe.forward_backward(x, labels)
        assert gradient(pipe) == 1.75
        assert float(loss) == 1.75
        result = pipe.evaluate([(x, labels)])
        assert (result.loss, result.num_items) == (1.75, 4)


def test_num_items_makes_a_token_mean_over_calls(session: PausedSession) -> None:
    model = nn.Sequential(Times())
    with rp.RoundPipe(
        model, sgd(model), loss_fn=masked_mean, loss_weight=valid, num_microbatches=1, session=session
    ) as pipe:
        pipe.forward_backward(torch.tensor([[4.0, 0.0]]), torch.tensor([[0, -100]]), num_items=4)
        pipe.forward_backward(torch.tensor([[1.0, 1.0, 1.0]]), torch.zeros(1, 3, dtype=torch.long), num_items=4)
        assert gradient(pipe) == 1.75


@pytest.mark.parametrize("round_size", [None, 1])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_small_gradients_are_not_lost_in_16_bits(
    session: PausedSession, grad_dtype: torch.dtype | None, round_size: int | None
) -> None:
    """N3: 1 and 512 times 2^-9 make exactly 2.0; a sum in bfloat16 stays at 1."""
    x = torch.tensor([1.0] + [2**-9] * 512, dtype=torch.bfloat16)
    assert torch.tensor(1.0, dtype=torch.bfloat16) + x[1] == 1.0
    model = nn.Sequential(Times(dtype=torch.bfloat16))
    with rp.RoundPipe(
        model, sgd(model), loss_fn=identity, num_microbatches=513, plan=ExecutionPlan([], [range(1)], round_size),
        grad_dtype=grad_dtype, session=session,
    ) as pipe:  # fmt: skip
        pipe.forward_backward(x, num_items=1)
        assert gradient(pipe) == 2.0


# --- N7: dropout


class Recorder(nn.Module):
    """Dropout that keeps what it drew, by what was going on; the log is the test's own list (inline sessions)."""

    log: list[tuple[int, tuple[bool, ...]]] = []

    def __init__(self, name: int) -> None:
        super().__init__()
        self.name = name
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.drop(torch.ones(16)) > 0
        self.log.append((self.name, tuple(mask.tolist())))
        return x * mask


def masks(workers: int, plan: ExecutionPlan, recompute: str = "stage") -> list[tuple[int, tuple[bool, ...]]]:
    """All masks drawn in two iterations of two calls, without repetition, sorted by layer."""
    Recorder.log.clear()
    model = nn.Sequential(nn.Linear(16, 16), Recorder(1), nn.Linear(16, 16), Recorder(3), nn.Linear(16, 1))
    torch.manual_seed(0)
    with (
        inline(workers=workers) as session,
        rp.RoundPipe(
            model,
            sgd(model),
            loss_fn=identity,
            num_microbatches=4,
            seed=7,
            plan=plan,
            recompute=recompute,
            session=session,
        ) as pipe,
    ):
        for _ in range(2):
            for _ in range(2):
                pipe.forward_backward(torch.randn(4, 16))
            pipe.step()
    return sorted(dict.fromkeys(Recorder.log))


def test_masks_belong_to_step_micro_batch_and_layer() -> None:
    """N7 b, c: the same on any number of workers, under any plan, in recompute; all different otherwise."""
    fused = ExecutionPlan([], [range(5)])
    wanted = masks(1, fused)
    assert len(wanted) == 2 * 16  # two layers, 16 micro-batches: recompute drew nothing new
    assert len({mask for _, mask in wanted}) == 2 * 16
    assert masks(2, ExecutionPlan.one_layer_a_stage(5)) == wanted
    assert masks(4, ExecutionPlan([range(3)], [range(3, 5), range(3)], 2)) == wanted
    assert masks(1, fused, "layer") == wanted
    assert masks(3, ExecutionPlan([range(4)], [range(4, 5), range(4)]), "layer") == wanted


def test_dropout_is_that_of_a_loop_with_the_same_seeds(session: PausedSession) -> None:
    """N7 a."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    x = torch.randn(2, 4)
    for p in model.parameters():
        p.grad = None
    wanted_loss = 0.0
    for m in range(2):
        value = x[m : m + 1].clone()
        for position, layer in enumerate(model):
            torch.manual_seed(rp.layer_seed(11, 0, m, position))
            value = layer(value)
        (value.mean() / 2).backward()
        wanted_loss += value.mean().item() / 2
    wanted = {name: p.grad for name, p in model.named_parameters()}
    with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=2, seed=11, session=session) as pipe:
        loss = pipe.forward_backward(x)
        found = pipe.gradients()
        assert float(loss) == pytest.approx(wanted_loss, rel=1e-6)
        assert all(torch.equal(found[name], grad) for name, grad in wanted.items())


# --- N9: the caller's numeric context


class Witness(nn.Module):
    """A linear layer that notes the settings under which it runs."""

    seen: list[dict[str, Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen.append(
            {
                "autocast": torch.is_autocast_enabled("cpu"),
                "autocast_dtype": torch.get_autocast_dtype("cpu"),
                "dtype": y.dtype,
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "default": torch.get_default_dtype(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "precision": torch.get_float32_matmul_precision(),
                "tf32": torch.backends.cudnn.allow_tf32,
            }
        )
        return y.float()


@contextlib.contextmanager
def unusual_settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("inside", [True, False])
def test_the_callers_settings_reach_forward_and_recompute(session: PausedSession, inside: bool, grad_mode: Any) -> None:
    """N9. The work runs when the settings are no longer those of the call."""
    model = nn.Sequential(Witness(), Witness(), Witness())
    with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=2, session=session) as pipe:
        Witness.seen.clear()
        session.paused = True
        with unusual_settings() if inside else contextlib.nullcontext(), grad_mode():
            pipe.forward_backward(torch.ones(2, 4, dtype=torch.float32))
        assert not Witness.seen
        session.paused = False
        with contextlib.nullcontext() if inside else unusual_settings():
            pipe.gradients()
        assert len(Witness.seen) == 2 * 5  # the last layer is not recomputed
        for found in Witness.seen:
            assert found["autocast"] == inside and found["grad"] and not found["inference"]
            assert found["dtype"] == (torch.bfloat16 if inside else torch.float32)
            assert found["default"] == (torch.float64 if inside else torch.float32)
            assert found["deterministic"] == inside
            assert found["precision"] == ("high" if inside else "highest")
            assert found["tf32"] == (not inside)
        assert torch.get_default_dtype() == torch.float32 and not torch.are_deterministic_algorithms_enabled()


def test_autocast_around_the_loop_or_around_each_call(session: PausedSession) -> None:
    """Autocast keeps casts of weights until its block ends; the next step's weights are others."""
    weights = []
    for around_loop in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        x = torch.ones(2, 4)
        with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=2, session=session) as pipe:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around_loop):
                for _ in range(3):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        pipe.forward_backward(x)
                    pipe.step()
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_evaluating_in_inference_mode_and_training_after_it(session: PausedSession) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(4, 4)
    with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=2, session=session) as pipe:
        for _ in range(2):
            with torch.inference_mode():
                before = pipe.forward(x), pipe.evaluate([(x, None)])
                assert torch.equal(pipe.forward(x), before[0])
                assert before[1].loss == pytest.approx(before[0].mean().item())
            pipe.forward_backward(x)
            pipe.step()


# --- N10: side effects happen once


class Counter(nn.Module):
    """Counts its forwards in a buffer, and adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("kept", None)
        self.register_buffer("constant", torch.arange(3.0), persistent=False)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.weight


@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("plan", [ExecutionPlan.one_layer_a_stage(4), ExecutionPlan([], [range(4)])])
def test_buffers_are_updated_once(
    session: PausedSession, plan: ExecutionPlan, num_microbatches: int, recompute: str
) -> None:
    """N10: momentum 0.1 and a mean of 1 give 0.1; 0.19 if the recompute counts too."""
    model = nn.Sequential(Times(), nn.BatchNorm1d(2), Counter(), nn.Linear(2, 1))
    with rp.RoundPipe(
        model, sgd(model, 0.0), loss_fn=identity, num_microbatches=num_microbatches, plan=plan, recompute=recompute,
        session=session,
    ) as pipe:  # fmt: skip
        x = torch.tensor([[0.0, 2.0], [2.0, 0.0]]).repeat(num_microbatches, 1)
        pipe.forward_backward(x)
        pipe.step()
        pipe.forward(x)
        pipe.evaluate([(x, None)])
        pipe.synchronize()
        wanted = 1 - 0.9**num_microbatches
        assert model[1].running_mean.tolist() == pytest.approx([wanted, wanted])
        assert model[1].num_batches_tracked.item() == num_microbatches
        assert model[2].count.item() == num_microbatches and model[2].count.dtype == torch.long
        assert model[2].kept is None and torch.equal(model[2].constant, torch.arange(3.0))


class Router(nn.Module):
    """Two experts with exactly tied scores."""

    chosen: list[tuple[int, ...]] = []

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.zeros(len(x), 4) * x.mean()
        scores = scores + torch.rand(4).round()  # random ties, from the layer's seed
        expert = scores.topk(1, -1).indices[:, 0]
        self.chosen.append(tuple(expert.tolist()))
        return torch.einsum("bi,bij->bj", x, self.experts[expert])


def test_routing_is_the_same_in_recompute(session: PausedSession) -> None:
    model = nn.Sequential(Router(), Router(), nn.Linear(8, 1))
    Router.chosen.clear()
    with rp.RoundPipe(model, sgd(model), loss_fn=identity, num_microbatches=2, session=session) as pipe:
        pipe.forward_backward(torch.randn(6, 8))
        pipe.gradients()
    forward, again = Router.chosen[:4], Router.chosen[4:]
    assert sorted(forward) == sorted(again) and len(again) == 4


# --- N13: nothing valid in a micro-batch; NaN


@pytest.mark.parametrize("ignored", [0, 2, 3])
@pytest.mark.parametrize("plan", [ExecutionPlan.one_layer_a_stage(3), ExecutionPlan([], [range(3)], 2)])
def test_a_micro_batch_without_a_valid_label(session: PausedSession, plan: ExecutionPlan, ignored: int) -> None:
    """N13: the same as the run on the other rows, wherever the ignored one is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5))
    x, labels = torch.randn(4, 4), torch.tensor([0, 1, 2, 3])
    rest = [m for m in range(4) if m != ignored]
    wanted_loss = nn.functional.cross_entropy(model(x[rest]), labels[rest])
    wanted = torch.autograd.grad(wanted_loss, model.parameters())
    labels[ignored] = -100
    with rp.RoundPipe(
        model, sgd(model), loss_fn=nn.functional.cross_entropy, loss_weight=valid, num_microbatches=4, plan=plan,
        session=session,
    ) as pipe:  # fmt: skip
        loss = pipe.forward_backward(x, labels)
        for found, grad in zip(pipe.gradients().values(), wanted, strict=True):
            torch.testing.assert_close(found, grad)
        assert float(loss) == pytest.approx(wanted_loss.item())
        with pytest.raises(ConfigError, match="0 for every micro-batch"):
            pipe.forward_backward(x, torch.full((4,), -100))


def test_a_nan_loss_goes_on_and_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Times())
    with inline(quiet=False) as session, rp.RoundPipe(
        model, sgd(model), loss_fn=identity, num_microbatches=4, session=session
    ) as pipe:  # fmt: skip
        loss = pipe.forward_backward(torch.tensor([1.0, 1.0, float("nan"), 1.0]))
        info = pipe.step()
        assert float(loss) != float(loss) and info.loss != info.loss
        pipe.synchronize()
        assert model[0].w.isnan()
        assert "micro-batch 3 is nan" in capfd.readouterr().err


# --- H1, H2: tied, frozen


@pytest.mark.parametrize("workers", [1, 2])
def test_a_layer_used_twice(workers: int) -> None:
    """H1 a: one storage, one optimizer entry, the sum of both gradients."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain)]
    with inline(workers=workers) as session, rp.RoundPipe(
        model, optimizers[0], loss_fn=nn.functional.mse_loss, num_microbatches=2, session=session
    ) as pipe:  # fmt: skip
        for _ in range(10):
            x, y = torch.randn(4, 4), torch.randn(4, 4)
            pipe.forward_backward(x, y)
            pipe.step()
            nn.functional.mse_loss(plain(plain(x).tanh()), y).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        pipe.synchronize()
        assert model[0] is model[2] and len(optimizers[0].state_dict()["state"]) == 2
        torch.testing.assert_close(layer.weight, plain.weight, rtol=0, atol=1e-6)
    assert model[0].weight.data_ptr() == model[2].weight.data_ptr()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_embedding_and_head(workers: int, tied: bool) -> None:
    """H1 b, c: tied stays tied and trains as one, untied stays untied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight if tied else nn.Parameter(model[0].weight.detach().clone())
    plain = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False))
    plain[2].weight = plain[0].weight if tied else plain[2].weight
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    with inline(workers=workers) as session, rp.RoundPipe(
        model, optimizers[0], loss_fn=nn.functional.cross_entropy, num_microbatches=2, session=session
    ) as pipe:  # fmt: skip
        for _ in range(10):
            x, y = torch.randint(7, (4,)), torch.randint(7, (4,))
            pipe.forward_backward(x, y)
            pipe.step()
            nn.functional.cross_entropy(plain(x), y).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        pipe.synchronize()
        assert len(optimizers[0].state_dict()["state"]) == len(optimizers[1].state_dict()["state"])
        for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, wanted, rtol=0, atol=1e-6)
        assert (model[0].weight is model[2].weight) == tied
        assert torch.equal(model[0].weight, model[2].weight) == tied


def test_two_views_of_one_storage_are_refused(session: PausedSession) -> None:
    """H1 d."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().view(4, 2))
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are different parameters over the same memory"):
        rp.RoundPipe(model, sgd(model), loss_fn=identity, session=session)


@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize(
    "plan", [ExecutionPlan.one_layer_a_stage(4), ExecutionPlan([range(2)], [range(2, 4), range(2)])]
)
@pytest.mark.parametrize("trainable", [0, 1, 3])
def test_only_one_layer_trains(session: PausedSession, trainable: int, plan: ExecutionPlan, recompute: str) -> None:
    """H2: the gradient comes through frozen layers, which stay bitwise as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for position, layer in enumerate(model):
        layer.requires_grad_(position == trainable)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(4, 4)
    wanted = torch.autograd.grad(model(x).square().mean(), model[trainable].parameters())
    with rp.RoundPipe(
        model, torch.optim.AdamW(model.parameters()), loss_fn=lambda y: y.square().mean(), num_microbatches=2,
        plan=plan, recompute=recompute, session=session,
    ) as pipe:  # fmt: skip
        pipe.forward_backward(x)
        found = pipe.gradients()
        assert list(found) == [f"{trainable}.weight", f"{trainable}.bias"]
        for grad, value in zip(found.values(), wanted, strict=True):
            torch.testing.assert_close(grad, value)
        pipe.step()
        pipe.synchronize()
        for index, (p, old) in enumerate(zip(model.parameters(), before, strict=True)):
            assert torch.equal(p, old) == (index // 2 != trainable)
        units = session._optimizer[1]._models[pipe._model.number].units
        assert [unit is not None for unit in units] == [position == trainable for position in range(4)]


def test_nothing_to_train_is_an_error(session: PausedSession) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        rp.RoundPipe(model, torch.optim.AdamW(model.parameters()), loss_fn=identity, session=session)
    with rp.RoundPipe(model, loss_fn=identity, session=session) as pipe:
        x = torch.randn(2, 4)
        torch.testing.assert_close(pipe.forward(x), model(x))
        with pytest.raises(ConfigError, match="nothing to train"):
            pipe.forward_backward(x)


def test_gradients_without_an_optimizer(session: PausedSession) -> None:
    model = nn.Sequential(Times())
    with rp.RoundPipe(model, loss_fn=identity, num_microbatches=1, session=session) as pipe:
        pipe.forward_backward(torch.tensor([3.0]))
        assert gradient(pipe) == 3.0
        assert model[0].w.grad is None
        with pytest.raises(ConfigError, match="no optimizer"):
            pipe.step()


# --- H4: what is cut


class Everything(nn.Module):
    """Uses every argument, each row on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(
        self, x: Tensor, mask: Tensor, row_mask: Tensor, positions: Tensor, shared: Tensor, offsets: Tensor,
        factor: Tensor, power: int, nothing: None, more: dict[str, Tensor],
    ) -> Tensor:  # fmt: skip
        assert nothing is None and power == 2 and tuple(offsets.tolist()) == (0, 1, 2, 3, 4)
        scores = x[:, None, :, None] * mask * row_mask  # [B, 1, S, S]
        placed = positions.sum(0) + shared  # [B, S]
        return self.w * (scores.sum((1, 3)) + placed * more["row"]) ** power * factor


@pytest.mark.parametrize("batch", [4, 3])
def test_arguments_are_cut_where_the_script_says(session: PausedSession, batch: int) -> None:
    """H4. With 3 rows, dim 0 of `positions` looks like them: the script's chunk_dims decide."""
    s = 5
    torch.manual_seed(0)
    inputs = {
        "x": torch.randn(batch, s), "mask": torch.rand(1, 1, s, s), "row_mask": torch.rand(batch, 1, s, s),
        "positions": torch.rand(3, batch, s), "shared": torch.rand(1, s), "offsets": torch.arange(5),
        "factor": torch.tensor(3.0), "power": 2, "nothing": None, "more": {"row": torch.rand(batch, 1)},
    }  # fmt: skip
    dims: dict[str | int, int | None] = {"mask": None, "positions": 1, "shared": None, "offsets": None}
    model = nn.Sequential(Everything())
    wanted = model[0](**inputs)
    (wanted_gradient,) = torch.autograd.grad(wanted.mean(), model.parameters())
    with rp.RoundPipe(
        model, sgd(model), loss_fn=identity, num_microbatches=2, chunk_dims=dims, session=session
    ) as pipe:
        pipe.forward_backward(inputs)
        assert gradient(pipe) == pytest.approx(wanted_gradient.item(), rel=1e-5)
        torch.testing.assert_close(pipe.forward(inputs), wanted)
    for missing in ("mask", "positions", "shared", "offsets"):
        if batch == 3 and missing == "positions":
            continue  # cut along the wrong dim, but `placed` has then two rows against one or two of x
        rest = {key: dim for key, dim in dims.items() if key != missing}
        with (
            rp.RoundPipe(
                model, sgd(model), loss_fn=identity, num_microbatches=2, chunk_dims=rest, session=session
            ) as pipe,
            pytest.raises(ConfigError, match=missing),
        ):
            pipe.forward_backward(inputs)
        assert model[0].w.item() == 1.0


# --- H5: what layers return


@dataclasses.dataclass
class Output:
    hidden: Tensor
    size: int
    rest: Any = None


class Give(nn.Module):
    """Wraps its input in a structure of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {
            "tuple_with_none": lambda: (y, None, x),
            "int_and_str": lambda: (3, "name", y),
            "bool_tensor": lambda: (y, y > 0),
            "integer_tensor": lambda: (y, (y * 4).long()),
            "dict": lambda: {"y": y, "x": [x]},
            "dataclass": lambda: Output(y, 7, {"again": Output(x, 1)}),
            "nested_list": lambda: [[y], [[x, 2.5]]],
            "same_twice": lambda: (y, y),
            "input_unchanged": lambda: (y, x),
            "only_input": lambda: x,
            "view_of_input": lambda: (y, x[:, 1:], x.t()),
            "in_place_input": lambda: (x.mul_(2.0), 1),
            "only_in_place": lambda: x.add_(1.0),
            "in_place_view": lambda: (x[:, :2].mul_(3.0), x),
            "no_gradient": lambda: (y, torch.full((len(x), 4), 2.0), x.detach()),
            "unused": lambda: (y, y.exp()),
            "empty": lambda: (y, y[:, :0], torch.zeros(0)),
            "expanded": lambda: (y, y.sum(0, keepdim=True).expand(len(x), 4)),
        }[self.kind]()


class Take(nn.Module):
    """Adds up what any structure holds, and changes what it can in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Any) -> Tensor:
        if self.kind == "unused":
            return self.linear(value[0])
        total = torch.zeros(())
        if isinstance(value, tuple) and self.kind in ("bool_tensor", "integer_tensor"):
            value = (value[0], value[1] * value[0])
        for part in leaves(value):
            total = total + (part.float().sum() * 0.5 if isinstance(part, Tensor) else len(str(part)))
        first = next(part for part in leaves(value) if isinstance(part, Tensor))
        return self.linear(first[:, :2].repeat(1, 2) * total)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    else:
        yield value


KINDS = [
    "tuple_with_none", "int_and_str", "bool_tensor", "integer_tensor", "dict", "dataclass", "nested_list", "same_twice",
    "input_unchanged", "only_input", "view_of_input", "in_place_input", "only_in_place", "in_place_view", "no_gradient",
    "unused", "empty", "expanded",
]  # fmt: skip


@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_may_return_anything(session: PausedSession, kind: str, recompute: str) -> None:
    """H5: outputs and gradients match plain torch, wherever the stages end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), Give(kind), nn.Identity(), Take(kind), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    wanted = torch.zeros(())
    outputs = []
    for m in range(2):
        outputs.append(model(x[2 * m : 2 * m + 2].clone()))
        wanted = wanted + outputs[-1].mean() / 2
    gradients = torch.autograd.grad(wanted, model.parameters(), allow_unused=True)
    for plan in (
        ExecutionPlan.one_layer_a_stage(6),
        ExecutionPlan([], [range(6)]),
        ExecutionPlan([range(3)], [range(3, 6), range(3)]),
        ExecutionPlan([range(2), range(2, 5)], [range(5, 6), range(1, 5), range(1)]),
    ):
        with rp.RoundPipe(
            model, sgd(model), loss_fn=identity, num_microbatches=2, plan=plan, recompute=recompute, session=session
        ) as pipe:
            loss = pipe.forward_backward(x)
            found = pipe.gradients()
            assert float(loss) == pytest.approx(wanted.item(), rel=1e-6)
            torch.testing.assert_close(pipe.forward(x), torch.cat(outputs))
            for (name, p), grad in zip(model.named_parameters(), gradients, strict=True):
                if grad is None:
                    assert name not in found or not found[name].any()
                else:
                    torch.testing.assert_close(found[name], grad, msg=f"{name} of {p.shape} under {plan}")


class Pass(nn.Module):
    """(x, table) -> (Linear(x) * table, table): the table is passed on unchanged."""

    pointers: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Any, *rest: Any) -> Any:
        x, table = (pair, rest[0]) if rest else pair
        assert not table.requires_grad
        return self.linear(x) * table, table


@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("plan", [ExecutionPlan.one_layer_a_stage(4), ExecutionPlan([], [range(4)])])
def test_what_is_passed_on_unchanged_wants_no_gradient(
    session: PausedSession, plan: ExecutionPlan, recompute: str
) -> None:
    """As in plain torch, where a mask among the inputs never does; kernels are chosen by it."""
    model = nn.Sequential(*(Pass() for _ in range(4)))
    with rp.RoundPipe(
        model, sgd(model), loss_fn=lambda y: y[0].mean(), num_microbatches=2, plan=plan, recompute=recompute,
        session=session,
    ) as pipe:  # fmt: skip
        pipe.forward_backward((torch.randn(4, 4), torch.rand(4, 4)))
        assert len(pipe.gradients()) == 8


# --- H6: the optimizer is torch's


def test_the_optimizer_stays_a_torch_optimizer(session: PausedSession) -> None:
    model = nn.Sequential(Times(), Times())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})  # later than the first
    with rp.RoundPipe(model, optimizer, loss_fn=identity, num_microbatches=1, session=session) as pipe:
        assert isinstance(optimizer, torch.optim.Optimizer) and pipe.optimizer is optimizer
        pipe.forward_backward(torch.tensor([1.0]))
        info = pipe.step()
        optimizer.param_groups[0]["lr"] = 100.0  # belongs to the next step
        assert info.lr == (1.0, 0.5)
        pipe.synchronize()
        assert (model[0].w.item(), model[1].w.item()) == (0.0, 0.5)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(()))]})
        pipe.forward_backward(torch.tensor([1.0]))
        with pytest.raises(ConfigError, match=r"param_groups\[2\] changed after the model was wrapped"):
            pipe.step()
        del optimizer.param_groups[2]
        pipe.step()


# --- D1: rows


@pytest.mark.parametrize("rows, num_microbatches", [(8, 3), (2, 4), (1, 4), (5, 4), (8, 8)])
def test_rows_that_do_not_divide(rows: int, num_microbatches: int, capfd: pytest.CaptureFixture[str]) -> None:
    """D1: loss and gradients equal the unsplit batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with inline(workers=2, quiet=False) as session, rp.RoundPipe(
        model, sgd(model, 0.0), loss_fn=nn.functional.mse_loss, num_microbatches=num_microbatches, session=session
    ) as pipe:  # fmt: skip
        for length in (7, 3, 5):  # of the sequence, another one each step
            x, y = torch.randn(rows, length, 4), torch.randn(rows, length, 3)
            wanted = nn.functional.mse_loss(model(x), y)
            gradients = torch.autograd.grad(wanted, model.parameters())
            loss = pipe.forward_backward(x, y)
            for found, grad in zip(pipe.gradients().values(), gradients, strict=True):
                torch.testing.assert_close(found, grad)
            assert float(loss) == pytest.approx(wanted.item(), rel=1e-6)
            pipe.step()
            pipe.synchronize()  # the script's parameters are looked at again
        told = capfd.readouterr().err
        assert told.count("fewer than num_microbatches") == (rows < num_microbatches)
        with pytest.raises(ConfigError, match="no rows"):
            pipe.forward_backward(torch.zeros(0, 4), torch.zeros(0, 3))


# --- M5: many parameters, and none


class Many(nn.Module):
    """A thousand parameters of 16 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack(list(self.rows)).sum(0)


@pytest.mark.parametrize("thousands", [7, pytest.param(70, marks=pytest.mark.slow)])
def test_thousands_of_small_parameters(thousands: int) -> None:
    """M5 c: they lie in few large pieces of memory."""
    model = nn.Sequential(*(Many() for _ in range(thousands)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (
        inline() as session,
        rp.RoundPipe(model, optimizer, loss_fn=identity, num_microbatches=1, session=session) as pipe,
    ):
        loss = pipe.forward_backward(torch.zeros(1, 16))
        pipe.step()
        pipe.synchronize()
        assert float(loss) == thousands * 1000
        assert model[-1].rows[999].tolist() == [1 - 1 / 16] * 16
        assert len(session.segments._maps) < thousands * 1000 / 70


def test_layers_without_parameters_and_parameters_without_elements(session: PausedSession) -> None:
    """M5 d."""

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 4))
            self.register_buffer("empty", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.none.sum()

    model = nn.Sequential(
        nn.Identity(), Nothing(), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1), nn.Flatten(0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with rp.RoundPipe(model, optimizer, loss_fn=identity, num_microbatches=2, session=session) as pipe:
        for _ in range(2):
            pipe.forward_backward(torch.ones(4, 4))
            assert pipe.gradients()["1.none"].shape == (0, 4)
            pipe.step(max_grad_norm=1.0)
        pipe.synchronize()
        assert model[1].none.shape == (0, 4)
        assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (0, 4)


# --- metrics and outputs


def test_metrics_and_outputs(session: PausedSession) -> None:
    model = nn.Sequential(Times(2.0))

    def loss_fn(outputs: Tensor, labels: Tensor) -> Any:
        return (outputs - labels).mean(), {"largest": outputs.max(), "rows": float(len(labels))}

    with rp.RoundPipe(model, sgd(model), loss_fn=loss_fn, num_microbatches=2, session=session) as pipe:
        x, y = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
        pipe.forward_backward(x, y)
        result = pipe.evaluate([(x, y), (x[:1], y[:1])])
        assert (result.loss, result.num_items) == (pytest.approx((12 + 2) / 4), 4)
        assert result.metrics["rows"] == pytest.approx((2 * 2 + 1 * 1 + 1) / 4)
        info = pipe.step()
        assert info.metrics == {"largest": pytest.approx((4 * 2 + 6) / 3), "rows": pytest.approx(5 / 3)}
        pipe.synchronize()
        assert pipe.forward(x).tolist() == [0.0, 0.0, 0.0]


def test_the_last_layer_may_be_the_loss(session: PausedSession) -> None:
    class Head(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    model = nn.Sequential(Times(), Head())
    with rp.RoundPipe(model, sgd(model), num_microbatches=2, session=session) as pipe:
        loss = pipe.forward_backward(torch.tensor([1.0, 2.0]))
        assert (float(loss), gradient(pipe)) == (2.5, 5.0)
        assert pipe.forward(torch.tensor([1.0, 2.0])).item() == 2.5
        assert pipe.evaluate([(torch.tensor([1.0, 2.0]), None)]).loss == 2.5


def test_a_model_without_a_loss_can_be_evaluated(session: PausedSession) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    x = torch.randn(5, 4)
    with rp.RoundPipe(model, session=session) as pipe:
        torch.testing.assert_close(pipe.forward(x), model(x))
