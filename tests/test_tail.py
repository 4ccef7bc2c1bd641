"""A recomputation leaves out the last product of a layer where nobody reads it: gradients stay the same to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import rpruntime as rp
from rpruntime import ExecutionPlan
from rpruntime.worker import tail
from rpruntime.worker.tail import Tail
from tests.reference import PausedSession, inline

WIDTH = 8


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MIN_FLOPS", 0)
    monkeypatch.setenv("RPRUNTIME_POISON", "1")  # whoever reads what was left out reads no numbers


class Products(TorchDispatchMode):
    """Counts the products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in tail._PRODUCTS
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x)


class WithoutBias(Block):
    def __init__(self) -> None:
        super().__init__(bias=False)


class Alone(Block):
    forward = Block.inner


class InATuple(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return x + y, y.transpose(0, 1).contiguous() * 2


class Transposed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).transpose(0, 1) + x.transpose(0, 1)


class Normed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.inner(x))


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.inner(x), 0.5)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        return y


class ChangesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.clone())
        with torch.no_grad():
            x.mul_(2)
        return y + x


class ChangesItsInputLater(Block):
    def forward(self, x: Tensor) -> Tensor:
        z = x + self.inner(x.clone())
        with torch.no_grad():
            x.mul_(2)
        return z


class Deciding(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.inner(x)
        return y if y.sum() > 1e9 else y + y


class TwoInARow(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


class Twice(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(F.gelu(x))
        return x + self.mix(F.gelu(x))


class Twin(torch.autograd.Function):
    """Saves its input without launching anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class Custom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Twin.apply(self.inner(x))


class HiddenSaver(Block):
    """Another way out of the layer, on which a Function saves the product's result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return x + y, Twin.apply(y)


class Keeping(torch.autograd.Function):
    """Keeps its input where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.kept = y
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.kept, None


class HiddenKeeper(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return Keeping.apply(x, y.detach()) + y


class Hooked(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.register_hook(lambda grad: grad * (y > 0))
        return x + y


class OutputHooked(Block):
    def forward(self, x: Tensor) -> Tensor:
        z = x + self.inner(x)
        z.register_hook(lambda grad: grad * z)
        return z


class Sparse(Block):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        return self.inner(flat) + torch.eye(flat.shape[0]).to_sparse() @ flat


class Wrapped(Block):
    """Its Linear's hook returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_forward_hook(lambda module, args, output: (output, None))

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x)[0]


class SavesAProduct(torch.autograd.Function):
    """A product of its own, which is saved without being read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = x.flatten(0, -2) @ weight
        ctx.save_for_backward(out)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0].view(grad.shape), None


class SaverBeside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + SavesAProduct.apply(x, self.up.weight[:WIDTH].detach())


class SavedOutput(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = x + self.inner(x)
        return z, Twin.apply(z)


class InAThread(Block):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return x + pool.submit(self.inner, x).result()


class Copied(Block):
    """A copy of its Linear has the hooks of that moment."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(x))
        self.copy = copy.deepcopy(self.down)
        return x + self.down(hidden)


class Caught(Block):
    """Its Linear is called with the wrong dtype first."""

    def inner(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(self.norm(x)))
        try:
            return self.down(hidden.double())
        except RuntimeError:
            return self.down(hidden)


class Autocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.inner(x)


class Half(Block):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        return x + self.inner(x)


LEFT_OUT = [Block, WithoutBias, Alone, TwoInARow, Twice, Half, Caught, Sparse, ChangesItsInput]
NEEDED = [InATuple, Transposed, Normed, Dropped, InPlace, ChangesItsInputLater, Deciding, Custom, Autocast]
NEEDED += [HiddenSaver, HiddenKeeper, Hooked, OutputHooked, Wrapped, SaverBeside, SavedOutput, InAThread]


def tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def gradients(layer: nn.Module, run: Any, shape: tuple[int, ...]) -> list[Tensor]:
    """Of the input and the parameters."""
    layer.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(shape).requires_grad_()
    outputs = tensors_of(run(x.clone()))
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return [x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]  # type: ignore[list-item]


@pytest.mark.parametrize("shape", [(3, WIDTH), (2, 3, WIDTH)], ids=["2d", "3d"])
@pytest.mark.parametrize("kind", [*LEFT_OUT, *NEEDED])
def test_gradients_are_those_of_the_whole_layer(kind: type[Block], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = kind()
    left_out = Tail(layer)
    expected = gradients(layer, layer, shape)
    for _ in range(3):
        found = gradients(layer, left_out.run, shape)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    for other in ((5, WIDTH), (2, 2, WIDTH)):  # what was learned holds for other sizes
        found, expected = gradients(layer, left_out.run, other), gradients(layer, layer, other)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", [*LEFT_OUT, *NEEDED])
def test_the_last_product_is_left_out_where_nobody_reads_it(kind: type[Block]) -> None:
    layer, x = kind(), torch.randn(3, WIDTH, requires_grad=True)
    left_out = Tail(layer)
    counts = []
    for _ in range(4):
        left_out.run(x.clone())
        counts.append(left_out.num_left_out)
    each = (1 if kind is Alone else 2) if kind in LEFT_OUT else 0
    assert counts == [0, each, each, each]


@pytest.mark.parametrize("kept", ["closure", "attribute"])
def test_what_is_kept_in_some_later_run_only_is_computed_then(kept: str) -> None:
    class Later(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            self.calls += 1
            if self.calls > 2 and kept == "closure":
                x.register_hook(lambda grad: grad * y.detach())
            elif self.calls > 2:
                self.kept = y
            return x + y

    torch.manual_seed(0)
    layer, reference = Later(), Later()
    reference.load_state_dict(layer.state_dict())
    left_out = Tail(layer)
    counts = []
    for _ in range(4):
        found, expected = gradients(layer, left_out.run, (3, WIDTH)), gradients(reference, reference, (3, WIDTH))
        assert all(map(torch.equal, found, expected))
        counts.append(left_out.num_left_out)
    assert counts == [0, 2, 0, 0]
    assert kept == "closure" or torch.equal(layer.kept, reference.kept)


def test_nothing_stays_alive() -> None:
    layer, x = Block(), torch.randn(3, WIDTH)
    left_out = Tail(layer)
    for _ in range(3):
        value = left_out.run(x)
        alive = StorageWeakRef(value.untyped_storage())
        del value
        assert alive.expired()


class Adapted(Block):
    """A small product beside the large one, as adapters add it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2 * WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.down.requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(self.norm(x)))
        return self.down(hidden) + self.b(self.a(F.dropout(hidden, 0.1))) * 0.5


class ChangedBeside(Adapted):
    """What the large product reads is changed after it."""

    def inner(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(self.norm(x))).detach()
        y = self.down(hidden)
        hidden.mul_(2)
        return y + self.b(self.a(hidden.clone()))


@pytest.mark.parametrize("kind, each", [(Adapted, 3), (ChangedBeside, 0)])
def test_what_is_beside_the_product_is_computed(kind: type[Block], each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MIN_FLOPS", 2 * 3 * 2 * WIDTH * WIDTH)  # of the large one
    torch.manual_seed(0)
    layer = kind()
    left_out, counts = Tail(layer), []
    for _ in range(3):
        found, expected = gradients(layer, left_out.run, (3, WIDTH)), gradients(layer, layer, (3, WIDTH))
        counts.append(left_out.num_left_out)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert counts == [0, each, each]


def test_a_copy_of_the_linear_begins_nothing() -> None:
    layer, x = Copied(), torch.randn(3, WIDTH)
    left_out = Tail(layer)
    for _ in range(3):
        left_out.run(x)
    assert left_out.num_left_out == 2
    with Products() as products:
        layer.copy(torch.randn(3, 2 * WIDTH))
    assert products.count == 1 and not torch._C._len_torch_dispatch_stack()


def test_no_other_mode_is_disturbed() -> None:
    layer, x = Block(), torch.randn(3, WIDTH, requires_grad=True)
    left_out = Tail(layer)
    left_out.run(x)
    with Products() as products:
        left_out.run(x)
    assert products.count == 2 and left_out.num_left_out == 0
    with pytest.raises(RuntimeError):
        left_out.run(x[:, 1:])
    assert not torch._C._len_torch_dispatch_stack() and not layer.down._forward_pre_hooks


def test_small_products_and_whole_recomputations_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Block(), torch.randn(3, WIDTH, requires_grad=True)
    monkeypatch.setattr(tail, "MIN_FLOPS", 2 * 3 * WIDTH * 2 * WIDTH + 1)
    small = Tail(layer)
    monkeypatch.setenv("RPRUNTIME_RECOMPUTE", "whole")
    whole = Tail(layer)
    monkeypatch.setattr(tail, "MIN_FLOPS", 0)
    for left_out in (whole, whole):
        left_out.run(x)
        assert left_out.num_left_out == 0
    monkeypatch.setattr(tail, "MIN_FLOPS", 2 * 3 * WIDTH * 2 * WIDTH + 1)
    for _ in range(2):
        small.run(x)
        assert small.num_left_out == 0


@pytest.fixture
def workers() -> Iterator[PausedSession]:
    with inline(workers=2, delayed_copies=3) as session:
        yield session


@pytest.mark.parametrize("plan", ["layers", ExecutionPlan([range(0, 3)], [range(3, 4), range(0, 3)])])
@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_a_run_is_the_same_to_the_bit(
    workers: PausedSession, monkeypatch: pytest.MonkeyPatch, plan: Any, recompute: str
) -> None:
    def train() -> tuple[list[float], dict[str, Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(Dropped(), Twice(), Block(), nn.Linear(WIDTH, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with rp.RoundPipe(
            model, optimizer, loss_fn=F.cross_entropy, num_microbatches=3, plan=plan, recompute=recompute,
            session=workers,
        ) as pipe:  # fmt: skip
            losses = []
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(6, WIDTH, generator=generator)
                losses.append(float(pipe.forward_backward(x, torch.randint(3, (6,), generator=generator))))
                pipe.step().result()
            pipe.synchronize()
            tails = [layer.tail for _, shell in workers._workers for m in shell._models.values() for layer in m.layers]
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            return losses, weights, sum(tail.num_left_out for tail in tails)

    losses, weights, left_out = train()
    monkeypatch.setenv("RPRUNTIME_RECOMPUTE", "whole")
    expected_losses, expected_weights, nothing = train()
    assert losses == expected_losses
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert nothing == 0 < left_out
