"""`rp.losses` against torch in float64, in chunks of any size.   pytest tests/test_losses.py"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rpruntime as rp
from rpruntime.losses import LinearCrossEntropy, causal_lm, linear_cross_entropy, num_counted_labels
from tests.reference import inline


def case(rows: int, dtype: torch.dtype = torch.float64, ignored: str = "some"):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 6, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(9, 6, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(9, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(9, (rows,), generator=generator)
    if ignored == "some":
        labels[1::3] = -100
    elif ignored == "all":
        labels[:] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_cross_entropy_is_that_of_torch(rows, chunk, with_bias):
    hidden, weight, bias, labels = case(rows)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    wanted = F.cross_entropy(F.linear(*leaves), labels)
    gradients = torch.autograd.grad(3 * wanted, leaves)
    got = linear_cross_entropy(hidden, weight, labels, bias=bias if with_bias else None, chunk_tokens=chunk)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(3 * got, leaves), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_nothing_that_counts_gives_exactly_nothing():
    hidden, weight, bias, labels = case(5, ignored="all")
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=2)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, [hidden, weight, bias]))
    logits = torch.randn(1, 4, 9, requires_grad=True)
    loss = causal_lm(logits, torch.full((1, 4), -100))
    assert loss == 0 and (torch.autograd.grad(loss, logits)[0] == 0).all()


def test_rows_that_do_not_count_may_hold_anything():
    hidden, weight, bias, labels = case(7)
    with torch.no_grad():
        hidden[1] = float("nan")
        hidden[4] = float("inf")
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=3)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, [hidden, weight, bias]))


def test_another_index_may_be_the_ignored_one_and_shapes_are_free():
    hidden, weight, _, labels = case(12, ignored="none")
    got = linear_cross_entropy(hidden.reshape(2, 3, 2, 6), weight, labels.reshape(2, 3, 2), ignore_index=4)
    torch.testing.assert_close(got, F.cross_entropy(F.linear(hidden, weight), labels, ignore_index=4))


def test_bf16_sums_in_fp32():
    hidden, weight, _, labels = case(200, torch.float32)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    exact = [t.detach().double().requires_grad_() for t in low]
    wanted = F.cross_entropy(F.linear(*exact), labels)
    got = linear_cross_entropy(*low, labels, chunk_tokens=16)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=5e-3, atol=5e-3)
    for ours, theirs in zip(torch.autograd.grad(got, low), torch.autograd.grad(wanted, exact), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=1e-3)


def test_only_what_wants_a_gradient_gets_one():
    hidden, weight, bias, labels = case(5)
    loss = linear_cross_entropy(hidden.detach(), weight, labels, bias=bias.detach())
    assert torch.autograd.grad(loss, [weight])[0].abs().sum() > 0
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


@pytest.mark.parametrize("rows", [3, 4])
def test_arguments_that_do_not_fit_are_refused(rows):
    hidden, weight, _, labels = case(4)
    with pytest.raises(ValueError, match="do not fit" if rows == 3 else "chunk_tokens"):
        linear_cross_entropy(hidden, weight, labels[:rows], chunk_tokens=0 if rows == 4 else 1)


def test_no_more_logits_exist_than_a_chunk_has(monkeypatch):
    sizes = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: sizes.append(len(args[0])) or linear(*args))
    hidden, weight, _, labels = case(13)
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=4).backward()
    assert sizes == [4, 4, 4, 1]


def test_causal_lm_shifts_and_weighs():
    logits, labels = torch.randn(2, 5, 9), torch.randint(9, (2, 5))
    labels[0, :3] = -100
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(causal_lm(logits, labels), wanted)
    assert num_counted_labels(labels) == 6 and causal_lm.loss_weight is num_counted_labels


class Pair(nn.Module):
    """(hidden, labels) for a last layer that is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, value: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(value), labels


def test_linear_cross_entropy_as_a_last_layer():
    model = nn.Sequential(Pair(), LinearCrossEntropy(6, 9, bias=True, chunk_tokens=3))
    values, labels = torch.randn(8, 4), torch.randint(9, (8,))
    wanted = F.cross_entropy(F.linear(model[0].inner(values), model[1].weight, model[1].bias), labels)
    gradients = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(wanted, list(model.parameters())), strict=True)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inline() as session, rp.RoundPipe(model, optimizer, num_microbatches=2, session=session) as pipe:
        assert float(pipe.forward_backward((values, labels))) == pytest.approx(wanted.item(), abs=1e-6)
        for name, gradient in pipe.gradients().items():
            torch.testing.assert_close(gradient, gradients[name])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_token_means_do_not_depend_on_the_cut(count):
    """One weight w and losses w * t: one token t=4 in a row, three t=1 in another. The gradient is 7 / 4."""
    model = nn.Sequential(Scaled())
    values = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]])
    with (
        inline() as session,
        rp.RoundPipe(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=token_mean,
            num_microbatches=count,
            session=session,
        ) as pipe,
    ):
        assert float(pipe.forward_backward(values, labels)) == 1.75
        assert pipe.gradients()["0.weight"] == 1.75


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.weight * value


def token_mean(outputs: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return (outputs * counted).sum() / counted.sum()


token_mean.loss_weight = torch.sum  # type: ignore[attr-defined]
