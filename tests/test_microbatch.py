"""Cutting a call, weighing its losses, merging its outputs.   pytest tests/test_microbatch.py"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rpruntime.errors import ConfigError
from rpruntime.microbatch import Coefficient, cut_call, merge_metrics, merge_outputs

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass
class Loose:
    x: Any
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        raise AssertionError("rebuilding runs no constructor")

    @classmethod
    def make(cls, x: Any) -> Loose:
        self = object.__new__(cls)
        self.x, self.size = x, 7
        return self


class Encoding(UserDict):
    """Like transformers' BatchEncoding: a mapping that is no dict, with a state of its own."""

    encodings = "none"


class Output(OrderedDict):
    """Like transformers' ModelOutput: items are attributes too."""

    logits: Tensor

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (dict, UserDict, MappingProxyType)):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    return bool(a == b)


def rows_tensor(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


# ---- N2, N13, D1: what the loss and the gradient come to


def token_mean(w: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    return (w * tokens * valid).sum() / valid.sum()  # NaN for a micro-batch without a valid token


def gradient_over(call: Any, w: Tensor) -> float:
    total = torch.zeros(())
    for (tokens,), valid, coefficient in zip(call.args, call.labels, call.coefficients, strict=True):
        total = total + coefficient.apply(token_mean(w, tokens, valid))
    (grad,) = torch.autograd.grad(total, w)
    assert total.item() == 1.75 * w.item()
    return grad.item()


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_token_mean_gradient_does_not_depend_on_the_cut(num_microbatches: int) -> None:
    tokens = torch.tensor([[4.0, 9.0], [9.0, 9.0], [1.0, 1.0], [1.0, 9.0]])
    valid = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    w = torch.tensor(2.0, requires_grad=True)
    call = cut_call(tokens, valid, num_microbatches=num_microbatches, loss_weight=torch.sum)
    assert len(call.args) == num_microbatches
    assert gradient_over(call, w) == 1.75


def test_token_mean_gradient_of_micro_batches_already_cut() -> None:
    w = torch.tensor(2.0, requires_grad=True)
    call = cut_call(
        [torch.tensor([4.0]), torch.ones(3)],
        [torch.ones(1), torch.ones(3)],
        num_microbatches=8,
        loss_weight=torch.sum,
    )
    assert gradient_over(call, w) == 1.75


def test_num_items_makes_several_calls_one_mean() -> None:
    w = torch.tensor(2.0, requires_grad=True)
    total = torch.zeros(())
    for tokens in (torch.tensor([4.0]), torch.ones(3)):
        valid = torch.ones_like(tokens)
        call = cut_call(tokens, valid, num_microbatches=3, loss_weight=torch.sum, num_items=torch.tensor(4))
        for (part,), label, coefficient in zip(call.args, call.labels, call.coefficients, strict=True):
            total = total + coefficient.apply(token_mean(w, part, label))
    (grad,) = torch.autograd.grad(total, w)
    assert grad.item() == 1.75


def test_micro_batch_of_weight_zero_contributes_exactly_zero() -> None:
    logits = torch.randn(4, 3, 5, requires_grad=True)
    labels = torch.randint(0, 5, (4, 3))
    labels[2] = -100
    call = cut_call(logits, labels, num_microbatches=4, loss_weight=lambda y: (y != -100).sum())
    assert call.weights == [3, 3, 0, 3]

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), y.flatten())

    losses = [loss_fn(x, y) for (x,), y in zip(call.args, call.labels, strict=True)]
    assert losses[2].isnan()
    parts = [c.apply(loss) for c, loss in zip(call.coefficients, losses, strict=True)]
    assert parts[2].item() == 0
    assert not parts[2].requires_grad
    kept = [0, 1, 3]
    reference = loss_fn(logits[kept], labels[kept])
    (expected,) = torch.autograd.grad(reference, logits)
    total = torch.stack(parts).sum()
    (grad,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(total, reference)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("rows, num, cuts", [(8, 3, [3, 3, 2]), (2, 4, [1, 1]), (1, 8, [1])])
def test_uneven_batches_equal_the_unsplit_one(rows: int, num: int, cuts: list[int]) -> None:
    x, y = torch.randn(rows, 5, dtype=torch.float64), torch.randn(rows, dtype=torch.float64)
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(((x @ w - y) ** 2).mean(), w)
    call = cut_call((x,), y, num_microbatches=num)
    assert call.rows == cuts
    assert call.weights == cuts
    total = torch.zeros((), dtype=torch.float64)
    for (part,), label, coefficient in zip(call.args, call.labels, call.coefficients, strict=True):
        total = total + coefficient.apply(((part @ w - label) ** 2).mean())
    (grad,) = torch.autograd.grad(total, w)
    torch.testing.assert_close(grad, expected)


def test_coefficients() -> None:
    x = torch.zeros(6, 2)

    def of(**kwargs: Any) -> list[tuple[float, float]]:
        return [dataclasses.astuple(c) for c in cut_call(x, x, **kwargs).coefficients]

    assert of(num_microbatches=3) == [(1, 3)] * 3
    assert of(num_microbatches=4) == [(2, 6), (2, 6), (1, 6), (1, 6)]
    assert of(num_microbatches=3, num_items=24) == [(2, 24)] * 3
    weights = iter([1, torch.tensor(3), 0.5])
    assert of(num_microbatches=3, loss_weight=lambda y: next(weights)) == [(1, 4.5), (3, 4.5), (0.5, 4.5)]
    assert next(weights, "used up") == "used up"


def test_apply_divides_once_and_multiplies_only_when_needed() -> None:
    loss = torch.tensor(0.1)
    assert torch.equal(Coefficient(1, 3).apply(loss), loss / 3)
    assert torch.equal(Coefficient(7, 3).apply(loss), loss * 7 / 3)
    assert Coefficient(2, 4).apply(3.0) == 1.5
    assert Coefficient(0, 4).apply(math.nan) == 0


# ---- H4: which tensor is cut


def attention(kw: dict[str, Any]) -> Tensor:
    """Row-wise in the batch, and using every argument. Returns [B, S]."""
    positions = kw["positions"].sum(0) + kw["shared_positions"]  # [B, S]
    scores = kw["shared_mask"][:, 0] + kw["mask"][:, 0]  # [B, S, S]
    extra = kw["more"]["a"] * kw["offsets"].sum() + kw["more"]["b"][0]
    return scores.sum(-1) * positions * kw["scale"] * kw["repeat"] + extra


def attention_kwargs(batch: int, seq: int = 6) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "mask": torch.randn(batch, 1, seq, seq),
        "shared_mask": torch.randn(1, 1, seq, seq),
        "positions": torch.randn(3, batch, seq),
        "shared_positions": torch.randn(1, seq),
        "offsets": torch.randn(5),
        "scale": torch.tensor(2.0),
        "repeat": 3,
        "cache": None,
        "more": {"a": torch.randn(batch, seq), "b": [torch.randn(batch, 1)]},
    }


CHUNK_DIMS = {"shared_mask": None, "positions": 1, "shared_positions": None, "offsets": None}


@pytest.mark.parametrize("batch", [4, 3])
def test_masks_positions_offsets_and_scalars_equal_the_unsplit_run(batch: int) -> None:
    kwargs = attention_kwargs(batch)
    call = cut_call(kwargs, torch.zeros(batch), num_microbatches=2, chunk_dims=CHUNK_DIMS)
    assert call.args == [(), ()]
    assert all(part["scale"] is kwargs["scale"] and part["cache"] is None for part in call.kwargs)
    merged = merge_outputs([attention(part) for part in call.kwargs], call.rows)
    torch.testing.assert_close(merged, attention(kwargs))


@pytest.mark.parametrize("name, dim", CHUNK_DIMS.items())
def test_a_tensor_without_the_rows_is_named_with_the_line_to_paste(name: str, dim: int | None) -> None:
    given_dims = {key: value for key, value in CHUNK_DIMS.items() if key != name}
    with pytest.raises(ConfigError) as caught:
        cut_call(attention_kwargs(4), torch.zeros(4), num_microbatches=2, chunk_dims=given_dims)
    message = str(caught.value)
    assert message.startswith(f"{name} has shape")
    pasted = eval("dict(" + message[message.index("chunk_dims=") : message.index("}") + 1] + ")")
    assert pasted["chunk_dims"] == CHUNK_DIMS


@pytest.mark.parametrize(
    "inputs, labels, path",
    [
        ((torch.zeros(4), torch.zeros(3)), torch.zeros(4), "argument 1 "),
        ({"batch": {"ids": torch.zeros(4), "mask": torch.zeros(3)}}, torch.zeros(4), "batch['mask'] "),
        ({"batch": Frozen(1, [torch.zeros(3)])}, torch.zeros(4), "batch.y[0] "),
        (Pair(torch.zeros(4), Pair(0, torch.zeros(3))), torch.zeros(4), "argument 1.right "),
        (torch.zeros(4), (torch.zeros(4), torch.zeros(3)), "labels[1] "),
    ],
)
def test_a_mismatch_names_its_place(inputs: Any, labels: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cut_call(inputs, labels, num_microbatches=2)
    assert str(caught.value).startswith(path)


def test_rows_come_from_labels_then_from_the_first_tensor_along_its_dim() -> None:
    x, positions = rows_tensor(4, 2), rows_tensor(3, 4)
    assert cut_call(x, [torch.tensor(1.0), "tag", torch.zeros(4)], num_microbatches=2).rows == [2, 2]
    assert cut_call((torch.tensor(1.0), {"x": [x]}), None, num_microbatches=2).labels == [None, None]
    call = cut_call((positions, 5), None, num_microbatches=3, chunk_dims={0: -1})
    assert call.rows == [2, 1, 1]
    assert torch.equal(call.args[0][0], positions[:, :2])
    assert call.args[2][1] == 5
    whole = cut_call(x, torch.zeros(9), num_microbatches=2, chunk_dims={"labels": None})
    assert whole.rows == [2, 2]
    assert whole.labels[1].shape == (9,)


def test_pieces_are_views() -> None:
    x = rows_tensor(5, 2)
    call = cut_call(x, None, num_microbatches=2)
    call.args[1][0].zero_()
    assert torch.equal(x[3:], torch.zeros(2, 2))
    assert x[2, 1] == 5


def test_containers_keep_type_and_state() -> None:
    x = rows_tensor(4, 2)
    encoding = Encoding(x=x)
    encoding.encodings = "state"
    output = Output(logits=x)
    plain = ["no", {"tensor": 1}]
    tree = (encoding, output, Loose.make(x), torch.Size([9]), MappingProxyType({"x": x}), plain, {1, 2})
    first = cut_call(tree, None, num_microbatches=2).args[0]
    assert [type(part) for part in first] == [type(part) for part in tree]
    assert first[0].encodings == "state"
    assert first[0]["x"].shape == (2, 2)
    assert first[1].logits is first[1]["logits"]
    assert first[1].logits.shape == (2, 2)
    assert first[2].size == 7
    assert first[2].x.shape == (2, 2)
    assert first[3] == (9,)
    assert first[4]["x"].shape == (2, 2)
    assert first[5] is plain
    assert first[6] is tree[6]
    assert (encoding["x"] is x, output.logits is x) == (True, True), "the caller's containers were written to"


def test_forms_of_inputs() -> None:
    x = rows_tensor(4, 2)
    assert cut_call(Encoding(x=x), None, num_microbatches=1).kwargs[0]["x"].shape == (4, 2)
    call = cut_call([(x, 1), {"x": x}, x[:1], [x]], None, num_microbatches=2)
    assert call.args == [(x, 1), (), (call.args[2][0],), ([x],)]
    assert call.kwargs == [{}, {"x": x}, {}, {}]
    assert call.rows == [4, 4, 1, 4]
    assert call.labels == [None] * 4
    assert call.warning is None


def test_no_tensors() -> None:
    call = cut_call({"text": "abc"}, None, num_microbatches=1)
    assert (call.rows, call.kwargs, call.coefficients) == ([1], [{"text": "abc"}], [Coefficient(1, 1)])
    assert cut_call(["abc", "de"], None, num_microbatches=9).rows == [1, 1]
    with pytest.raises(ConfigError, match="num_microbatches=1"):
        cut_call({"text": "abc"}, None, num_microbatches=2)


def test_fewer_rows_than_micro_batches_are_reported() -> None:
    call = cut_call(torch.zeros(2, 1), None, num_microbatches=4)
    assert call.coefficients == [Coefficient(1, 2)] * 2
    assert call.warning is not None
    assert "2 rows" in call.warning
    assert "num_microbatches=4" in call.warning
    assert cut_call(torch.zeros(4, 1), None, num_microbatches=4).warning is None


X = torch.zeros(4, 2)


@pytest.mark.parametrize(
    "inputs, labels, options, match",
    [
        (torch.zeros(0, 2), None, {}, "no rows"),
        ([X, X[:0]], None, {}, "micro-batch 1 has no rows"),
        ([], None, {}, "empty"),
        ([X, X], X, {}, "pass a tuple"),
        ([X, X], [X], {}, "list of 2 or None, not 1 of them"),
        ({1: X}, None, {}, r"key 1.*\(batch,\)"),
        (X, X, {"num_microbatches": 0}, "num_microbatches"),
        (X, X, {"num_microbatches": 2.0}, "num_microbatches"),
        (X, X, {"num_microbatches": True}, "num_microbatches"),
        ({"ids": X}, X, {"chunk_dims": {"idz": 1}}, "'idz'.*'labels', 'ids'"),
        (X, X, {"chunk_dims": {1: 0}}, "names 1,.*'labels', 0"),
        ([(X, X)], None, {"chunk_dims": {2: 0}}, "names 2,"),
        (X, X, {"chunk_dims": {0: 1}}, r"argument 0 has shape \[4, 2\].*4 rows"),
        (X, X, {"chunk_dims": {0: 2}}, "no dim 2"),
        (X, X, {"chunk_dims": {0: False}}, "int"),
        (X.to_sparse(), X, {}, "argument 0 cannot be cut"),
        (X, X, {"loss_weight": lambda y: 0}, "0 for every micro-batch"),
        (X, X, {"loss_weight": lambda y: 0, "num_items": 5}, "0 for every micro-batch"),
        (X, X, {"loss_weight": lambda y: -1}, "micro-batch 0"),
        (X, X, {"loss_weight": lambda y: torch.ones(1)}, "0-d tensor"),
        (X, X, {"loss_weight": lambda y: math.nan}, "finite"),
        (X, X, {"loss_weight": lambda y: None}, "number"),
        (X, None, {"loss_weight": len}, "pass labels"),
        (X, X, {"num_items": 0}, "num_items"),
        (X, X, {"num_items": -1}, "num_items"),
    ],
)
def test_refused(inputs: Any, labels: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        cut_call(inputs, labels, **{"num_microbatches": 2, **options})


def test_an_exception_of_loss_weight_is_the_users() -> None:
    with pytest.raises(ZeroDivisionError):
        cut_call(X, X, num_microbatches=2, loss_weight=lambda y: 1 / 0)


# ---- merging


def test_merge_joins_averages_and_keeps() -> None:
    outputs = [
        {"logits": rows_tensor(3, 2), "loss": torch.tensor(1.0), "aux": 1.0, "table": torch.ones(7), "k": 5},
        {"logits": rows_tensor(1, 2), "loss": torch.tensor(5.0), "aux": 3.0, "table": torch.ones(7), "k": 5},
    ]
    merged = merge_outputs(outputs, [3, 1])
    assert torch.equal(merged["logits"], torch.cat([rows_tensor(3, 2), rows_tensor(1, 2)]))
    assert merged["loss"] == 2
    assert merged["aux"] == 1.5
    assert merged["k"] == 5
    assert torch.equal(merged["table"], torch.ones(7))
    assert merge_outputs(outputs, [3, 1], [1, 3])["loss"] == 4
    assert merge_outputs([math.nan, 2.0], [1, 1], [0, 1]) == 2
    assert math.isnan(merge_outputs([1.0, 2.0], [1, 1], [0, 0]))


def test_merge_keeps_a_table_as_long_as_one_micro_batch() -> None:
    assert torch.equal(merge_outputs([torch.ones(3), torch.ones(3)], [3, 2]), torch.ones(3))


def test_one_micro_batch_is_returned_as_it_is() -> None:
    output = object()
    assert merge_outputs([output], [4]) is output


@pytest.mark.parametrize(
    "outputs, path",
    [
        ([{"a": torch.zeros(3)}, {"a": torch.ones(3)}], "output['a'] "),
        ([Pair(1, "x"), Pair(1, "y")], "output.right "),
        ([[1, 2], [1]], "output "),
        ([{"a": 1}, {"b": 1}], "output "),
        ([(1,), (1.0,)], "output[0] "),
        ([torch.tensor(1), torch.tensor(2)], "output "),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "output "),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], "output "),
        ([object(), object()], "output "),
    ],
)
def test_what_cannot_be_merged_is_named(outputs: list[Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merge_outputs(outputs, [2, 2])
    assert str(caught.value).startswith(path + "cannot be merged from 2 micro-batches")


def test_merge_metrics() -> None:
    metrics = [{"acc": 1.0, "only": 4.0}, {"acc": 0.0}, {"acc": math.nan, "none": 1.0}]
    merged = merge_metrics(metrics, [3, 1, 0])
    assert list(merged) == ["acc", "only", "none"]
    assert merged["acc"] == 0.75
    assert merged["only"] == 4
    assert math.isnan(merged["none"])


# ---- any tree, any rows, any M


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, int, int]:
    """(inputs with at least one tensor of `rows` rows, rows, M)"""
    rows = draw(st.integers(1, 9))
    shapes = st.lists(st.integers(0, 3), max_size=2).map(lambda rest: rows_tensor(rows, *rest))
    scalars = st.floats(-4, 4, width=32).map(torch.tensor)
    leaves = shapes | scalars | st.none() | st.integers() | st.text(max_size=2) | st.floats(allow_nan=False)
    names = st.text("abc", min_size=1, max_size=2)

    def inner(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        mappings = st.dictionaries(names, child, max_size=3)
        return st.one_of(
            st.lists(child, max_size=3),
            st.lists(child, max_size=3).map(tuple),
            *(mappings.map(kind) for kind in (dict, OrderedDict, Output, Encoding, MappingProxyType)),
            *(st.builds(kind, child, child) for kind in (Pair, Frozen)),
            child.map(Loose.make),
        )

    tree = draw(st.recursive(leaves, inner, max_leaves=8))
    return (tree, rows_tensor(rows, 2)), rows, draw(st.integers(1, 11))


@given(calls())
def test_cutting_then_merging_is_the_identity(drawn: tuple[Any, int, int]) -> None:
    inputs, rows, num = drawn
    call = cut_call(inputs, None, num_microbatches=num)
    assert len(call.args) == min(num, rows)
    assert sum(call.rows) == rows
    assert max(call.rows) - min(call.rows) <= 1
    assert same(merge_outputs(call.args, call.rows), inputs)


@given(st.integers(1, 40), st.integers(1, 11), st.data())
def test_contributions_add_up_to_the_weighted_mean(rows: int, num: int, data: st.DataObject) -> None:
    weight = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows)))
    if not weight.any():
        weight[-1] = 1
    value = torch.arange(rows, dtype=torch.float64)
    call = cut_call(value, weight, num_microbatches=num, loss_weight=torch.sum)
    total = sum(
        c.apply((v * w).sum() / w.sum()) for (v,), w, c in zip(call.args, call.labels, call.coefficients, strict=True)
    )
    torch.testing.assert_close(total, (value * weight).sum() / weight.sum())
