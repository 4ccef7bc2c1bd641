"""What is cut, joined, weighed and evaluated through a pipe; how pipes end.   pytest tests/test_cutting.py"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import rpruntime as rp
from rpruntime.microbatch import cut_call, merge_outputs
from tests.reference import PausedSession, Times, inline

pytestmark = pytest.mark.usefixtures("single_thread")


class Packed:
    """A container of the user's: registered with torch's pytree."""

    def __init__(self, values: Tensor, name: str) -> None:
        self.values, self.name = values, name


class Unknown:
    """Another one, which nobody registered."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


_pytree.register_pytree_node(Packed, lambda p: ([p.values], p.name), lambda children, name: Packed(*children, name))


class Unpack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, packed: Packed) -> Packed:
        assert packed.name == "batch"
        return Packed(packed.values * self.w, packed.name)


class SequenceFirst(nn.Module):
    """[S, B] -> tensors in many forms."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "by_column": x * 2,
            "by_row": x.T.contiguous()[:, :1].expand(-1, 1),
            "table": torch.arange(7.0),
            "mean": x.mean(),
            "share": float(x.sum()) / x.numel(),
            "name": "out",
            "none": None,
        }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def mean(outputs: Tensor) -> Tensor:
    return outputs.mean()


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
def test_outputs_are_joined_along_the_dim_that_was_cut(session: PausedSession, num_microbatches: int) -> None:
    x = torch.arange(4.0 * 5).reshape(4, 5)  # the batch is dim 1
    model = nn.Sequential(SequenceFirst())
    with rp.RoundPipe(model, chunk_dims={0: 1}, num_microbatches=num_microbatches, session=session) as pipe:
        found = pipe.forward(x)
        assert torch.equal(found["by_column"], x * 2)
        assert found["by_column"].shape == (4, 5)
        if num_microbatches < 5:  # [1, 1] says nothing; then it is the dim that was cut
            assert torch.equal(found["by_row"], x.T[:, :1])
        assert torch.equal(found["table"], torch.arange(7.0))
        assert found["mean"].item() == pytest.approx(x.mean().item(), rel=1e-6)
        assert found["share"] == pytest.approx(x.mean().item(), rel=1e-6)
        assert (found["name"], found["none"]) == ("out", None)


def test_the_dims_of_a_call() -> None:
    x = torch.zeros(4, 5)
    assert cut_call(x, None, num_microbatches=2).dims == (0,)
    assert cut_call(x, None, num_microbatches=2, chunk_dims={0: 1}).dims == (1, 0)
    call = cut_call({"a": x.T, "b": x, "c": x}, torch.zeros(5), num_microbatches=2, chunk_dims={"b": -1, "c": None})
    assert call.dims == (0, -1)
    pieces = [torch.zeros(2, 3), torch.zeros(2, 2)]
    assert merge_outputs(pieces, [3, 2], dims=(0, -1)).shape == (2, 5)
    with pytest.raises(rp.ConfigError, match="where they were cut"):
        merge_outputs(pieces, [3, 2], dims=(0,))


def test_containers_registered_with_pytree_travel_and_are_cut(session: PausedSession) -> None:
    model = nn.Sequential(Unpack(), Unpack())
    x = torch.arange(4.0)
    with rp.RoundPipe(
        model, sgd(model), loss_fn=lambda out: out.values.mean(), num_microbatches=4, plan="layers", session=session
    ) as pipe:
        found = pipe.forward(Packed(x, "batch"))
        assert isinstance(found, Packed) and torch.equal(found.values, 4 * x)
        assert float(pipe.forward_backward(Packed(x, "batch"))) == 6.0
        assert {name: g.item() for name, g in pipe.gradients().items()} == {"0.w": 3.0, "1.w": 3.0}


def test_rows_inside_an_object_that_cannot_be_cut_are_refused() -> None:
    value = Unknown(torch.zeros(4))
    with pytest.raises(rp.ConfigError, match=r"Unknown with rows in argument 1\.values.*register_pytree_node"):
        cut_call((torch.zeros(4), value), None, num_microbatches=2)
    whole = cut_call((torch.zeros(4), value), None, num_microbatches=2, chunk_dims={1: None})
    assert all(args[1] is value for args in whole.args)
    other = Unknown(torch.zeros(7))  # no rows: a table, say
    assert cut_call((torch.zeros(4), other), None, num_microbatches=2).args[0][1] is other


def weighted(outputs: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
    valid = labels >= 0
    return outputs[valid].mean(), {"largest": outputs[valid].max().item(), "count": valid.sum()}


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_evaluation_of_ragged_batches_is_weighted(session: PausedSession, num_microbatches: int) -> None:
    """The mean of all valid values of 4, 3 and 1 rows, whatever the cut; metrics by weight."""
    values = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0, 7.0]), torch.tensor([8.0])]
    labels = [torch.tensor([0, -1, 0, 0]), torch.zeros(3, dtype=torch.long), torch.tensor([0])]
    model = nn.Sequential(Times(), Times())
    with rp.RoundPipe(
        model, sgd(model), loss_fn=weighted, loss_weight=lambda y: (y >= 0).sum(), num_microbatches=num_microbatches,
        plan="layers", session=session,
    ) as pipe:  # fmt: skip
        batches = list(zip(values, labels, strict=True))
        result = pipe.evaluate(iter(batches))
        assert result.loss == pytest.approx((1 + 3 + 4 + 5 + 6 + 7 + 8) / 7, rel=1e-6)
        assert result.num_items == 7
        assert pipe.evaluate(batches, max_batches=1).num_items == 3
        for x, y in batches:  # one iteration over ragged batches: a mean over all of its items
            pipe.forward_backward(x, y, num_items=7)
        info = pipe.step()
        assert info.loss == pytest.approx(result.loss, rel=1e-6)
        if num_microbatches == 1:
            assert info.metrics["largest"] == pytest.approx((3 * 4 + 3 * 7 + 8) / 7)
        assert not pipe._model.books.finished


def test_evaluation_that_fails_leaves_nothing_behind(session: PausedSession) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 3).any():
                raise ValueError("three")
            return x

    model = nn.Sequential(Times(), Picky())
    with rp.RoundPipe(model, sgd(model), loss_fn=mean, num_microbatches=1, plan="layers", session=session) as pipe:
        with pytest.raises(ValueError, match="three"):
            pipe.evaluate([(torch.tensor([float(i)]), None) for i in range(6)])
        assert not pipe._model.books.finished and not pipe._model.books.losses
        assert pipe.evaluate([(torch.tensor([1.0]), None)]).loss == 1.0
        pipe.forward_backward(torch.tensor([1.0]))
        pipe.step()


def test_micro_batches_of_different_shapes_with_weights_and_metrics(session: PausedSession) -> None:
    """Packing: three sequences of 1, 2 and 5 tokens, each a micro-batch; the token mean is 28 / 8."""
    parts = [torch.tensor([[3.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 4.0, 4.0, 5.0, 5.0]])]
    labels = [torch.zeros_like(part, dtype=torch.long) for part in parts]
    model = nn.Sequential(Times(), Times())
    with rp.RoundPipe(
        model, sgd(model), loss_fn=weighted, loss_weight=lambda y: y.numel(), plan="layers", session=session
    ) as pipe:
        loss = pipe.forward_backward(parts, labels)
        assert float(loss) == 28 / 8
        assert {name: g.item() for name, g in pipe.gradients().items()} == {"0.w": 3.5, "1.w": 3.5}
        assert pipe.step().metrics == {"largest": (3 + 2 * 2 + 5 * 5) / 8, "count": (1 + 4 + 25) / 8}


@dataclass
class Batch:
    x: Tensor
    mask: Tensor | None
    kind: str


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: Batch) -> Batch:
        return Batch(batch.x * self.w, batch.mask, batch.kind)


def test_a_dataclass_is_cut_and_returned(session: PausedSession) -> None:
    model = nn.Sequential(TakesBatch(), TakesBatch())
    with rp.RoundPipe(model, num_microbatches=3, plan="layers", session=session) as pipe:
        found = pipe.forward(Batch(torch.arange(4.0), None, "k"))
        assert torch.equal(found.x, torch.arange(4.0)) and (found.mask, found.kind) == (None, "k")


# --- how a pipe ends


class Boom(RuntimeError):
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_in_the_block_closes_the_pipe_and_is_what_the_script_sees(asynchronous: bool) -> None:
    model = nn.Sequential(Times(), Times())
    with inline(workers=2) as session:  # looks for leaks
        pipe = rp.RoundPipe(
            model, sgd(model), loss_fn=mean, num_microbatches=2, plan="layers", asynchronous=asynchronous,
            session=session,
        )  # fmt: skip
        unsealed: list[Any] = []

        def script() -> None:
            with pipe:
                pipe.forward_backward(torch.tensor([1.0, 1.0]))
                pipe.step().result()
                session.paused = True
                unsealed.append(pipe.forward_backward(torch.tensor([5.0, 5.0])))
                session.paused = False
                raise Boom

        with pytest.raises(Boom):
            script()
        assert pipe._model.closed
        assert (model[0].w.item(), model[1].w.item()) == (0.0, 0.0)  # the step that was done before
        with pytest.raises(rp.RoundPipeError, match="closed while"):
            float(unsealed[0])
        with rp.RoundPipe(model, sgd(model), loss_fn=mean, session=session):
            pass


def test_an_exception_of_a_layer_is_not_masked_by_closing() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise Boom("layer")

    model = nn.Sequential(Times(), Fails())
    with inline(workers=2) as session, pytest.raises(Boom, match="layer"):
        with rp.RoundPipe(model, sgd(model), loss_fn=mean, num_microbatches=1, session=session) as pipe:
            float(pipe.forward_backward(torch.tensor([1.0])))


def test_close_forgets_the_model_also_where_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Times())
    with inline() as session:
        pipe = rp.RoundPipe(model, sgd(model), loss_fn=mean, num_microbatches=1, session=session)
        pipe.forward_backward(torch.tensor([1.0]))
        monkeypatch.setattr(pipe._model, "synchronize", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pipe.close()
        assert pipe._model.closed and not pipe._model.client.machine.has_model(pipe._model.number)
        assert "step" not in vars(pipe.optimizer)
        pipe.close()  # nothing more to do


def test_the_optimizers_state_after_closing(session: PausedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> torch.optim.Optimizer:
        model = nn.Sequential(Times())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with rp.RoundPipe(model, optimizer, loss_fn=mean, num_microbatches=1, session=session) as pipe:
            pipe.forward_backward(torch.tensor([3.0]))
            pipe.step()
        return optimizer

    (state,) = trained().state_dict()["state"].values()
    assert state["momentum_buffer"] == 3.0
    monkeypatch.setattr("rpruntime.closing.KEPT_STATE_FACTOR", 10**18)  # no room
    with pytest.raises(rp.RoundPipeError, match=r"before pipe\.close\(\)"):
        trained().state_dict()
    model = nn.Sequential(Times())
    optimizer = sgd(model)
    rp.RoundPipe(model, optimizer, loss_fn=mean, session=session).close()
    assert optimizer.state_dict()["state"] == {}  # nothing was stepped


def test_compile_is_refused_in_words(session: PausedSession) -> None:
    """P4."""
    model = nn.Sequential(Times())
    with pytest.raises(rp.ConfigError, match='compile is not supported yet; leave compile="off"'):
        rp.RoundPipe(model, sgd(model), loss_fn=mean, compile="layers", session=session)
    with pytest.raises(rp.ConfigError, match=r"before torch\.compile"):
        rp.RoundPipe(torch.compile(model, backend="eager"), session=session)


def test_auto_devices_count_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from rpruntime import session as sessions

    with inline() as session:
        session.config["devices_flag"] = "cpu:3"
        session.config["devices"] = ["cpu:0", "cpu:1", "cpu:2"]
        monkeypatch.setattr(sessions, "_current", None)
        monkeypatch.setattr(sessions, "_current_pid", -1)
        sessions._adopt(session)
        assert rp.init() is session
        with pytest.raises(rp.ConfigError, match=r"devices='auto'.*cpu:3"):
            rp.init(devices="auto")
        with pytest.raises(rp.ConfigError, match=r"devices='auto'.*cpu:3"):
            rp.init("auto")


def test_evaluate_of_one_batch_says_what_to_write() -> None:
    with inline(workers=1) as session:
        model = nn.Sequential(nn.Linear(2, 1))
        pipe = rp.RoundPipe(model, loss_fn=nn.functional.mse_loss, session=session)
        with pytest.raises(rp.ConfigError, match=r"evaluate\(\[batch\]\)"):
            pipe.evaluate({"x": torch.ones(2, 2)})


def test_a_batch_of_which_no_label_counts_is_left_out_of_an_evaluation_and_refused_in_training() -> None:
    def weight(labels: Tensor) -> Tensor:
        return (labels != -100).sum()

    def loss_fn(out: Tensor, labels: Tensor) -> Tensor:
        return ((out - labels) ** 2)[labels != -100].mean()

    with inline(workers=1) as session:
        model = nn.Sequential(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipe = rp.RoundPipe(
            model, optimizer, loss_fn=loss_fn, loss_weight=weight, num_microbatches=2, session=session
        )  # fmt: skip
        x, good, ignored = torch.ones(4, 2), torch.zeros(4, 1), torch.full((4, 1), -100.0)
        alone, both = pipe.evaluate([(x, good)]), pipe.evaluate([(x, ignored), (x, good)])
        assert (both.loss, both.num_items) == (alone.loss, 4)
        pipe.forward_backward(x, good)
        with pytest.raises(rp.ConfigError, match="no label of the batch counts"):
            pipe.forward_backward(x, ignored)
        with pytest.raises(rp.ConfigError, match="scale must be a finite number"):
            pipe.forward_backward(x, good, scale=float("nan"))
        with pytest.raises(rp.ConfigError, match="'default' has parameters of this model already"):
            rp.RoundPipe(model, loss_fn=loss_fn, name="other", session=session)
        pipe.step()
