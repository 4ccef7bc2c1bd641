"""Losses, gradients, weights, buffers: bit for bit a plain loop's.   pytest tests/test_training_exact.py"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rpruntime as rp
from rpruntime import ExecutionPlan
from rpruntime.store.arena import POISON_VARIABLE
from tests.examples import examples
from tests.reference import PlainLoop, inline

pytestmark = pytest.mark.usefixtures("single_thread")

SEED = 1234


# --- models


class Residual(nn.Module):
    """A block of a small GPT, [B, T, C] -> [B, T, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Embedding(nn.Module):
    """Tokens and positions, [B, T] -> [B, T, C]."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Parameter(torch.randn(length, width) / 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.place[: ids.shape[1]]


def mlp() -> nn.Sequential:
    """With dropout, a layer used twice and a frozen one."""
    twice = nn.Linear(12, 12)
    model = nn.Sequential(
        nn.Linear(6, 12),
        twice,
        nn.Tanh(),
        nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3)),
        twice,
        nn.ReLU(),
        nn.Linear(12, 3),
    )
    model[3][0].weight.requires_grad_(False)
    return model


def cnn() -> nn.Sequential:
    """With BatchNorm and an activation that works in place."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 9, 3),
    )  # fmt: skip


def gpt() -> nn.Sequential:
    """The head's weight is the embedding's."""
    embedding, head = Embedding(11, 7, 16), nn.Linear(16, 11, bias=False)
    head.weight = embedding.token.weight
    return nn.Sequential(embedding, Residual(16, 2), Residual(16, 2), nn.LayerNorm(16), head)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[Tensor, Tensor]]

    def model(self) -> nn.Sequential:
        torch.manual_seed(7)
        return self.build()


CASES = {
    "mlp": Case(mlp, lambda n: (torch.randn(n, 6), torch.randint(3, (n,)))),
    "cnn": Case(cnn, lambda n: (torch.randn(n, 2, 5, 5), torch.randint(3, (n,)))),
    "gpt": Case(gpt, lambda n: (torch.randint(11, (n, 7)), torch.randint(11, (n, 7)))),
}
NUM_LAYERS = {name: len(case.model()) for name, case in CASES.items()}


# --- comparing


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), f"{what}: {name}"


class Both:
    """The plain loop and the pipe, side by side; every method does the same to both and compares."""

    def __init__(
        self,
        session: Any,
        model: nn.Sequential,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        loss_fn: Callable[..., Any] = cross_entropy,
        wide: torch.dtype | None = None,
        num_microbatches: int = 4,
        asynchronous: bool = False,
        round_size: int | None = None,
        grad_dtype: torch.dtype | None = None,
        plan: Any = None,
        **settings: Any,
    ) -> None:
        plain = copy.deepcopy(model)
        runs_as = copy.deepcopy(model)
        self.plain_optimizer = make_optimizer(plain if wide is None else plain.to(wide))
        self.loop = PlainLoop(
            plain, self.plain_optimizer, loss_fn, num_microbatches=num_microbatches, seed=SEED,
            round_size=round_size, asynchronous=asynchronous, runs_as=runs_as, grad_dtype=grad_dtype,
        )  # fmt: skip
        self.optimizer = make_optimizer(model)
        self.pipe = rp.RoundPipe(
            model, self.optimizer, loss_fn=loss_fn, num_microbatches=num_microbatches, grad_dtype=grad_dtype,
            plan=plan or ExecutionPlan.one_layer_a_stage(len(model), round_size), asynchronous=asynchronous,
            seed=SEED, session=session, **settings,
        )  # fmt: skip
        self.losses: list[tuple[Any, float]] = []

    def call(self, inputs: Any, labels: Any, scale: float = 1.0) -> None:
        self.losses.append(
            (
                self.pipe.forward_backward(inputs, labels, scale=scale),
                self.loop.forward_backward(inputs, labels, scale=scale),
            )
        )

    def step(self, max_grad_norm: float | None = None) -> rp.StepInfo:
        info = self.pipe.step(max_grad_norm=max_grad_norm)
        self.loop.step(max_grad_norm=max_grad_norm)
        return info

    def zero_grad(self) -> None:
        self.pipe.zero_grad()
        self.loop.zero_grad()

    def check_gradients(self) -> None:
        assert_same(self.pipe.gradients(), self.loop.gradients(), "gradients")

    def check(self) -> None:
        assert [float(loss) for loss, _ in self.losses] == [wanted for _, wanted in self.losses]
        self.pipe.synchronize()
        weights = dict(self.loop.model.named_parameters())
        found = {name: p.detach() for name, p in self.pipe.model.named_parameters()}
        assert_same(found, {name: weights[name].detach().to(p.dtype) for name, p in found.items()}, "weights")
        buffers = {f"{k}.{n}": b for k, layer in self.pipe.model._modules.items() for n, b in layer.named_buffers()}
        assert_same(buffers, self.loop.stepped_buffers, "buffers")

    def close(self) -> None:
        self.check()
        self.pipe.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False, fused=False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False, fused=False)


# --- invariants 1, 2 and 3: any plan, any number of workers, both modes, both grains


@st.composite
def plans(draw: st.DrawFn, num_layers: int, num_microbatches: int) -> ExecutionPlan:
    def cut(stop: int) -> list[range]:
        inner = draw(st.sets(st.integers(1, stop - 1), max_size=3)) if stop > 1 else set()
        ends = [0, *sorted(inner), stop]
        return [range(a, b) for a, b in itertools.pairwise(ends)]

    fused = draw(st.integers(0, num_layers - 1))
    forward = cut(fused) if fused else []
    backward = cut(fused) if fused else []
    size = draw(st.none() | st.integers(1, num_microbatches))
    return ExecutionPlan(forward, [range(fused, num_layers), *reversed(backward)], size)


def run_anything(data: st.DataObject, name: str) -> None:
    case = CASES[name]
    m = data.draw(st.integers(1, 5), "micro-batches")
    plan = data.draw(plans(NUM_LAYERS[name], m), "plan")
    config = {"workers": data.draw(st.integers(1, 3), "workers")}
    if data.draw(st.booleans(), "delayed"):
        config["delayed_copies"] = data.draw(st.integers(0, 99), "seed of delays")
        config["window_bytes"] = data.draw(st.sampled_from([1, 100, 1 << 30]), "what a window takes")
    asynchronous = data.draw(st.booleans(), "asynchronous")
    grain = data.draw(st.sampled_from(["stage", "layer"]), "grain")
    torch.manual_seed(data.draw(st.integers(0, 9), "seed of data"))
    poison = {POISON_VARIABLE: "1"} if data.draw(st.booleans(), "released memory is overwritten") else {}
    with mock.patch.dict(os.environ, poison), inline(**config) as session:
        both = Both(
            session, case.model(), sgd, num_microbatches=m, round_size=plan.round_size, plan=plan,
            asynchronous=asynchronous, recompute=grain,
        )  # fmt: skip
        for _ in range(data.draw(st.integers(1, 4), "steps")):
            for _ in range(data.draw(st.integers(1, 3), "calls")):
                # a BatchNorm layer needs two rows at least
                rows = data.draw(st.integers(2 * m, 3 * m), "rows")
                both.call(*case.batch(rows), scale=data.draw(st.sampled_from([1.0, 0.25, 0.3]), "scale"))
                if data.draw(st.integers(0, 4), "zero_grad") == 0:
                    both.zero_grad()
                    both.call(*case.batch(rows))
            if data.draw(st.booleans(), "look"):
                both.check_gradients()
            both.step()
        both.close()


PHASES = [
    Phase.explicit,
    Phase.reuse,
    Phase.generate,
]  # an example says what it drew; shrinking takes minutes


@settings(examples(12), derandomize=True, database=None, phases=PHASES)
@given(data=st.data())
@pytest.mark.parametrize("name", CASES)
def test_any_run_equals_the_plain_loop(name: str, data: st.DataObject) -> None:
    run_anything(data, name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(examples(300), phases=PHASES)
@given(data=st.data())
@pytest.mark.parametrize("name", CASES)
def test_many_more_runs_equal_the_plain_loop(name: str, data: st.DataObject) -> None:
    run_anything(data, name)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", CASES)
def test_the_number_of_workers_changes_no_bit(name: str, asynchronous: bool) -> None:
    results = []
    for config in ({"workers": 1}, {"workers": 2}, {"workers": 3, "delayed_copies": 5}):
        torch.manual_seed(3)
        with inline(**config) as session:
            both = Both(session, CASES[name].model(), adamw, asynchronous=asynchronous)
            for _ in range(4):
                both.call(*CASES[name].batch(9))
                both.step()
            both.close()
            results.append({n: p.detach().clone() for n, p in both.pipe.model.named_parameters()})
    assert_same(results[1], results[0], "2 workers")
    assert_same(results[2], results[0], "3 workers")


# --- optimizers, schedulers, clipping, dtypes


def two_groups(kind: type, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        biases = [p for p in model.parameters() if p.dim() < 2]
        others = [p for p in model.parameters() if p.dim() >= 2]
        return kind([{"params": others}, {"params": biases, "weight_decay": 0.0, "lr": 0.003}], **settings)

    return make


OPTIMIZERS = {
    "sgd": two_groups(
        torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, fused=False, foreach=False
    ),
    "sgd_plain": two_groups(torch.optim.SGD, lr=0.05, maximize=True, foreach=True),
    "adamw": two_groups(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=False, foreach=False),
    "adam_amsgrad": two_groups(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.01, fused=False, foreach=True),
    "adam_tensor_lr": two_groups(torch.optim.Adam, lr=torch.tensor(0.01), fused=False, foreach=False),
    "rmsprop": two_groups(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, weight_decay=0.01),
    "adagrad": two_groups(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1, fused=False, foreach=False),
    "adadelta": two_groups(torch.optim.Adadelta, lr=0.5),
    "nadam": two_groups(torch.optim.NAdam, lr=0.01),
    "asgd": two_groups(torch.optim.ASGD, lr=0.01),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_two_groups(name: str, asynchronous: bool) -> None:
    torch.manual_seed(0)
    with inline() as session:
        both = Both(session, mlp(), OPTIMIZERS[name], num_microbatches=2, asynchronous=asynchronous)
        for _ in range(4):
            both.call(*CASES["mlp"].batch(4))
            both.step()
        both.check()
        wanted, found = both.plain_optimizer.state_dict(), both.optimizer.state_dict()
        assert found["param_groups"] == wanted["param_groups"]
        assert found["state"].keys() == wanted["state"].keys()
        for index, state in wanted["state"].items():
            assert found["state"][index].keys() == state.keys()
            for key, value in state.items():
                ours = found["state"][index][key]
                assert torch.equal(ours, value) if isinstance(value, Tensor) else ours == value, (index, key)
        both.close()


def test_an_optimizer_that_has_stepped_before_goes_on() -> None:
    def used(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=False, foreach=False)
        torch.manual_seed(1)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.randn_like(p) if p.requires_grad else None
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    torch.manual_seed(0)
    with inline() as session:
        model = mlp()
        plain, optimizer = copy.deepcopy(model), None
        optimizer = used(plain)
        loop = PlainLoop(plain, optimizer, cross_entropy, num_microbatches=2, seed=SEED)
        mine = used(model)
        pipe = rp.RoundPipe(model, mine, loss_fn=cross_entropy, num_microbatches=2, seed=SEED, session=session)
        for _ in range(3):
            batch = CASES["mlp"].batch(4)
            assert float(pipe.forward_backward(*batch)) == loop.forward_backward(*batch)
            pipe.step()
            loop.step()
        pipe.synchronize()
        assert_same(
            {n: p.detach() for n, p in model.named_parameters()},
            {n: p.detach() for n, p in plain.named_parameters()},
            "weights",
        )
        pipe.close()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.9**t]),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.1, 0.01], total_steps=8),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "cosine_warmup": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
        [2],
    ),
    "by_hand": lambda o: None,
}  # fmt: skip


@pytest.mark.parametrize("after_wrapping", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, after_wrapping: bool) -> None:
    """H6. The scheduler is made before or after the pipe; no warning (they are errors here)."""
    torch.manual_seed(0)
    optimizers: list[torch.optim.Optimizer] = []
    schedulers: list[Any] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = two_groups(torch.optim.AdamW, lr=0.01, fused=False, foreach=False)(model)
        optimizers.append(optimizer)
        if not after_wrapping:
            schedulers.append(SCHEDULERS[name](optimizer))
        return optimizer

    with inline() as session:
        both = Both(session, mlp(), make, num_microbatches=2)
        if after_wrapping:
            schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
        for t in range(6):
            lrs = tuple(float(group["lr"]) for group in both.optimizer.param_groups)
            both.call(*CASES["mlp"].batch(4))
            info = both.step()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                if name == "by_hand":
                    optimizer.param_groups[0]["lr"] = 0.02 / (t + 1)
                    optimizer.param_groups[1]["betas"] = (0.8, 0.9)
                elif name == "plateau":
                    scheduler.step(float(t % 2))
                else:
                    scheduler.step()
            assert info.lr == lrs
        assert both.optimizer.param_groups[0]["lr"] == both.plain_optimizer.param_groups[0]["lr"]
        both.close()


@pytest.mark.parametrize("limit", [1e-3, 0.37, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_is_that_of_torch(limit: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with inline() as session:
        model = CASES["cnn"].model().to(dtype)
        both = Both(session, model, adamw, num_microbatches=2)
        for _ in range(8):
            x, y = CASES["cnn"].batch(6)
            both.call(x.to(dtype), y)
            for p, total in both.loop.sums.items():
                p.grad = total
            wanted = nn.utils.get_total_norm([p.grad for p in both.loop.model.parameters()])
            assert both.step(max_grad_norm=limit).grad_norm == wanted.item()
        both.close()


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_bf16_with_an_fp32_copy(name: str, asynchronous: bool, grad_dtype: torch.dtype | None) -> None:
    """The optimizer steps fp32 weights; layers see them rounded. Gradients are rounded once a slot."""
    torch.manual_seed(0)
    with inline(workers=2) as session:
        model = CASES[name].model().to(torch.bfloat16)
        both = Both(
            session,
            model,
            adamw,
            wide=torch.float32,
            asynchronous=asynchronous,
            round_size=2,
            grad_dtype=grad_dtype,
        )
        for _ in range(3):
            for _ in range(2):
                x, y = CASES[name].batch(8)
                both.call(x.bfloat16() if x.is_floating_point() else x, y)
            both.check_gradients()
            both.step()
        both.close()


def test_dtype_casts_but_not_batch_norm() -> None:
    torch.manual_seed(0)
    model = CASES["cnn"].model()
    with inline() as session:
        runs_as = copy.deepcopy(model)
        for layer in runs_as:
            if not isinstance(layer, nn.BatchNorm2d):
                layer.to(torch.bfloat16)
        plain = copy.deepcopy(model)
        loop = PlainLoop(plain, adamw(plain), cross_entropy, num_microbatches=2, seed=SEED, runs_as=runs_as)
        pipe = rp.RoundPipe(
            model, adamw(model), loss_fn=cross_entropy, num_microbatches=2, seed=SEED, session=session,
            dtype=torch.bfloat16,
        )  # fmt: skip
        for _ in range(3):
            x, y = CASES["cnn"].batch(4)
            assert float(pipe.forward_backward(x.bfloat16(), y)) == loop.forward_backward(x.bfloat16(), y)
            pipe.step()
            loop.step()
        pipe.synchronize()
        assert model[1].weight.dtype == torch.float32 and model[0].weight.dtype == torch.bfloat16
        for p, wide in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, wide.to(p.dtype))
        pipe.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_float64(asynchronous: bool) -> None:
    torch.manual_seed(0)
    with inline(workers=2) as session:
        both = Both(session, mlp().double(), adamw, asynchronous=asynchronous)
        for _ in range(3):
            x, y = CASES["mlp"].batch(8)
            both.call(x.double(), y, scale=0.5)
            both.call(x.double(), y)
            both.check_gradients()
            both.step()
        both.close()


# --- what the script does between calls


@pytest.mark.parametrize("asynchronous", [False, True])
def test_reading_in_between_changes_nothing(asynchronous: bool) -> None:
    """`forward`, `evaluate`, `gradients` and `synchronize` between the calls of an iteration."""
    torch.manual_seed(0)
    case = CASES["cnn"]
    with inline(workers=2) as session:
        both = Both(session, case.model(), sgd, asynchronous=asynchronous)
        for _ in range(4):
            x, y = case.batch(8)
            both.call(x, y)
            both.pipe.forward(x)
            both.check_gradients()
            both.pipe.evaluate([(x, y), (x[:4], y[:4])])
            both.check()
            both.call(x, y)
            both.check_gradients()
            both.step()
            both.pipe.forward(x, num_microbatches=2)
        both.close()


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_copies_that_are_late_and_memory_that_is_overwritten_change_nothing_in_two_hundred_steps(
    asynchronous: bool,
) -> None:
    """Against copies that are there at once: N8 of the field's cases."""
    weights = []
    for late in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1))
        plan = ExecutionPlan([range(0, 2), range(2, 3)], [range(3, 5), range(1, 3), range(0, 1)])
        config = {"workers": 2, **({"delayed_copies": 7, "window_bytes": 50} if late else {})}
        poison = {POISON_VARIABLE: "1"} if late else {}
        with mock.patch.dict(os.environ, poison), inline(**config) as session:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            with rp.RoundPipe(
                model, optimizer, num_microbatches=3, plan=plan, asynchronous=asynchronous, seed=SEED, session=session,
                loss_fn=nn.functional.mse_loss,
            ) as pipe:  # fmt: skip
                for _ in range(200):
                    x = torch.randn(7, 6)
                    pipe.forward_backward(x, x.sum(1, keepdim=True))
                    pipe.step()
                last = float(pipe.forward_backward(x, x.sum(1, keepdim=True)))
        weights.append([last, *(p.detach().clone() for p in model.parameters())])
    assert weights[0][0] == weights[1][0] < 0.5
    assert all(torch.equal(a, b) for a, b in zip(weights[0][1:], weights[1][1:], strict=True))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_queued_ahead(asynchronous: bool) -> None:
    """Two iterations are queued before anything runs; with one process it must make no difference."""
    torch.manual_seed(0)
    case = CASES["gpt"]
    with inline(workers=2, delayed_copies=3) as session:
        both = Both(session, case.model(), adamw, asynchronous=asynchronous)
        for _ in range(3):
            session.paused = True
            for _ in range(2):
                both.call(*case.batch(4))
                both.call(*case.batch(4))
                both.step()
            session.paused = False
            both.check()
        both.close()


def test_micro_batches_already_cut_of_different_lengths() -> None:
    torch.manual_seed(0)
    case = CASES["gpt"]
    with inline() as session:
        both = Both(session, case.model(), sgd)
        for lengths in ((7, 5, 3), (4, 4, 4, 4), (2,)):
            ids = [torch.randint(11, (2, n)) for n in lengths]
            both.call(ids, [torch.randint(11, (2, n)) for n in lengths])
            both.step()
        both.close()


def test_eval_mode_of_submodules_follows_the_script() -> None:
    torch.manual_seed(0)
    with inline() as session:
        both = Both(session, mlp(), sgd)
        for frozen in (False, True, False):
            both.pipe.model[3][1].train(not frozen)
            both.loop.layers[3][1].train(not frozen)
            both.call(*CASES["mlp"].batch(8))
            both.step()
        both.close()


def test_a_second_pipe_of_another_name_trains_beside_the_first() -> None:
    torch.manual_seed(0)
    with inline(workers=2) as session:
        first = Both(session, mlp(), sgd, name="first")
        second = Both(session, CASES["gpt"].model(), adamw, name="second", asynchronous=True)
        for _ in range(3):
            first.call(*CASES["mlp"].batch(8))
            second.call(*CASES["gpt"].batch(8))
            second.step()
            first.step()
        first.close()
        second.call(*CASES["gpt"].batch(8))
        second.close()


def test_the_random_state_of_the_script_is_its_own() -> None:
    import random

    import numpy

    with inline() as session:
        both = Both(session, mlp(), sgd)
        batch = CASES["mlp"].batch(8)
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        wanted = torch.rand(1).item(), random.random(), numpy.random.rand()
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        both.pipe.forward_backward(*batch)
        both.pipe.step()
        assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == wanted
        both.pipe.close()
