"""A plain training loop in one process, with the grouping that DESIGN ("Semantics of sums and steps") fixes.

Every run of a `RoundPipe` must equal it bit for bit: per call and per round, a slot sums its micro-batches in
order from zero in fp32, multiplies by the call's scale and rounds once to the gradient's dtype; these are added in
(call, first micro-batch, deepest position first) order. Also inline sessions, and what they must leave behind: nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpruntime as rp
from rpruntime.client import client_of
from rpruntime.inline import InlineSession


class PlainLoop:
    """Forward, loss, backward, step: synchronous, or asynchronous with the weights of one step before.

    Args:
        model: holds the weights that the optimizer steps; fp32 or wider.
        optimizer: of `model.parameters()`.
        loss_fn: `loss_fn(outputs, labels)`.
        runs_as: a copy of the model in the dtypes in which the layers compute (default: the model's own).
        grad_dtype: what a slot's sum is rounded to (default: the dtype of the computing parameter).
    """

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        num_microbatches: int,
        seed: int,
        round_size: int | None = None,
        asynchronous: bool = False,
        runs_as: nn.Sequential | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.num_microbatches, self.round_size, self.seed = num_microbatches, round_size, seed
        self.asynchronous, self.grad_dtype = asynchronous, grad_dtype
        # each position computes with leaves of its own, also where the model repeats a layer
        self.layers = [copy.deepcopy(layer) for layer in (runs_as or model)]
        self.pairs = [
            list(zip(layer.parameters(), ours.parameters(), strict=True))
            for layer, ours in zip(model, self.layers, strict=True)
        ]
        self.names = {p: name for name, p in model.named_parameters()}
        self.stepped = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self.versions = [self._snapshot()]  # weights after 0, 1, 2... steps
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.microbatches = 0  # of this iteration so far
        self.stepped_buffers = self.buffers()  # as they were at the last step
        self.base = 0  # the oldest version that an asynchronous iteration reads

    @property
    def iteration(self) -> int:
        return len(self.versions) - 1

    def forward_backward(self, inputs: Any, labels: Any, *, scale: float = 1.0) -> float:
        self._load(max(self.base, self.iteration - 1) if self.asynchronous else self.iteration)
        chunks = self._cut(inputs), self._cut(labels)
        rows = [len(label) for label in chunks[1]]
        size = self.round_size or len(rows)
        total = torch.zeros((), dtype=torch.float32)
        for m, (x, y) in enumerate(zip(*chunks, strict=True)):
            if m % size == 0:
                slots: list[dict[nn.Parameter, Tensor]] = [{} for _ in self.layers]
            loss = self.loss_fn(self._forward(x.clone(), self.microbatches + m), y.clone())
            _share(loss, m, rows).backward()
            total += _share(loss.detach().float(), m, rows)
            self._add_up(slots)
            if m % size == size - 1 or m == len(rows) - 1:
                self._round_and_add(slots, scale)
        self.microbatches += len(rows)
        return total.item()

    def step(self, *, max_grad_norm: float | None = None) -> None:
        for parameter in self.names:
            parameter.grad = self.sums.get(parameter)
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sums, self.microbatches = {}, 0
        self.versions.append(self._snapshot())
        self.stepped_buffers = self.buffers()

    def zero_grad(self) -> None:
        self.sums = {}

    def rewind(self) -> None:
        """This iteration failed in the run: it begins again, and as at the start two iterations read its weights."""
        assert not self.sums
        self.base = self.iteration

    def gradients(self) -> dict[str, Tensor]:
        return {self.names[parameter]: total for parameter, total in self.sums.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Copies of them, by name in the model."""
        prefixes = list(self.model._modules)
        return {
            f"{prefixes[position]}.{name}": buffer.clone()
            for position, layer in enumerate(self.layers)
            for name, buffer in layer.named_buffers()
        }

    def _forward(self, value: Any, micro_batch: int) -> Any:
        for position, layer in enumerate(self.layers):
            torch.manual_seed(rp.layer_seed(self.seed, self.iteration, micro_batch, position))
            value = layer(value)
        return value

    def _cut(self, value: Any) -> list[Any]:
        return value if isinstance(value, list) else list(torch.tensor_split(value, self.num_microbatches))

    def _add_up(self, slots: list[dict[nn.Parameter, Tensor]]) -> None:
        for sums, pairs in zip(slots, self.pairs, strict=True):
            for parameter, leaf in pairs:
                if leaf.grad is not None and parameter in self.stepped:
                    wide = torch.promote_types(leaf.dtype, torch.float32)
                    sums.setdefault(parameter, torch.zeros(leaf.shape, dtype=wide)).add_(leaf.grad)
                leaf.grad = None

    def _round_and_add(self, slots: list[dict[nn.Parameter, Tensor]], scale: float) -> None:
        for sums, pairs in zip(reversed(slots), reversed(self.pairs), strict=True):
            for parameter, leaf in pairs:
                if parameter in sums:
                    rounded = (sums[parameter] * scale).to(self.grad_dtype or leaf.dtype)
                    self.sums.setdefault(parameter, torch.zeros_like(parameter)).add_(rounded)

    def _snapshot(self) -> dict[nn.Parameter, Tensor]:
        return {parameter: parameter.detach().clone() for parameter in self.model.parameters()}

    def _load(self, version: int) -> None:
        with torch.no_grad():
            for pairs in self.pairs:
                for parameter, leaf in pairs:
                    leaf.copy_(self.versions[version][parameter])


def _share(loss: Tensor, m: int, rows: list[int]) -> Tensor:
    """A micro-batch's share of its call's loss."""
    return loss / len(rows) if len(set(rows)) == 1 else loss * rows[m] / sum(rows)


# --- sessions


class PausedSession(InlineSession):
    """Calls are queued while `paused`, as with processes that have not come to them yet."""

    paused = False

    def drive(self) -> bool:
        return not self.paused and super().drive()


@contextlib.contextmanager
def inline(**config: Any) -> Iterator[PausedSession]:
    """An inline session that checks its redundant state, and that closed pipes have freed everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RPRUNTIME_DEBUG", "1")
        session = PausedSession({"quiet": True, **config})
        client = client_of(session)
    with session:
        yield session
        if not client.models or all(model.closed for model in client.models.values()):
            assert live_bytes(session) == {}
        client.close()


def live_bytes(session: InlineSession) -> dict[str, int]:
    """Bytes in use by arena, without the empty ones."""
    shells = {post.role: shell for post, shell in (session._optimizer, *session._workers)}
    arenas = {role: shell._arena for role, shell in shells.items()} | {"controller": client_of(session).arena}
    return {role: arena.live_bytes for role, arena in arenas.items() if arena.live_bytes}


class Times(nn.Module):
    """x -> w * x, with a scalar weight."""

    def __init__(self, start: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums do not depend on how many threads there are; the global generator is put back."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
