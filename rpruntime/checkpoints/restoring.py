"""New weights, buffers and optimizer state for a model that is loaded, wherever they come from.

RestoreEvent opens an iteration with new versions; then the units go to the optimizer one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from rpruntime.bar import Bar
from rpruntime.control import events as ev
from rpruntime.errors import CheckpointError, SessionLost, WorkerDied
from rpruntime.loading import put_tensor, views_of
from rpruntime.optimizer.scaling import from_dict
from rpruntime.optimizer.snapshots import ROWS_A_MESSAGE, WEIGHT
from rpruntime.store.arena import dtype_of
from rpruntime.store.handle import MAX_INLINE_SKELETON_BYTES, Extent, Payload, TensorHandle
from rpruntime.store.layout import optimizer_dtype
from rpruntime.store.values import take_apart
from rpruntime.wire.messages import RestoreMsg, RestoreUnitMsg, UnitSpec

if TYPE_CHECKING:
    from rpruntime.model import Model

Row = tuple[int, str, torch.Tensor]
"""(parameter's index in its unit, what it is of it, value)"""


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a model's state.

    Attributes:
        rows_of: of a unit, the tensors, and values that are none by (index, name); no rows: it stays as it is.
        buffers: of layers that have any, by position.
        given: (unit, index) of the parameters that get values.
        whole: the optimizer's state too, of every unit.
        previous: with the weights that the next iteration reads (asynchronous).
        step: steps behind it in the training; None: as many as now.
        seed: None: the seed stays.
        scaler: None: the loss scale stays.
    """

    rows_of: Callable[[UnitSpec], tuple[list[Row], dict[tuple[int, str], Any]]]
    buffers: dict[int, dict[str, Any]]
    given: Collection[tuple[int, int]]
    whole: bool = False
    previous: bool = False
    step: int | None = None
    seed: int | None = None
    scaler: dict[str, Any] | None = None


class Restoring:
    """Replaces the state of one model, with nothing running."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._client = model.client
        self._restored: set[int] = set()

    def on_restored(self, unit: int) -> None:
        """The optimizer has written a unit (under the client's lock)."""
        self._restored.add(unit)

    def install(self, new: Replacement, before: Callable[[], None]) -> None:
        """Open an iteration with these weights and buffers; `before` is called once there is room for the buffers."""
        model, client = self._model, self._client
        scaler = new.scaler
        grad_scaler = model.grad_scaler if model.grad_scaler is not None and model.grad_scaler.is_enabled() else None
        if grad_scaler is not None and scaler is None:
            scaler = grad_scaler.state_dict()
        payloads = self._place(new.buffers, before)
        call = client.new_call(model.number)
        client.forget_call(call)
        with client.lock:
            current = client.machine.newest_weights(model.number)
        try:
            client.do(ev.RestoreEvent(model.number, call, new.step, new.seed, tuple(payloads), new.previous))
            with client.lock:
                version = client.machine.iteration(model.number)
            sent = scaler if grad_scaler is not None else None
            client.send("optimizer", RestoreMsg(model.number, call, version, new.previous, sent))
            total, done = sum(unit.nbytes for unit in model.layout.units), 0
            with Bar("restoring weights", quiet=model._quiet) as bar:
                for unit in model.layout.units:
                    rows, plain = new.rows_of(unit)
                    if not unit.trainable and self._is_as_it_was(unit, rows, current[unit.index]):
                        rows = []
                    self._restore_unit(unit, rows, plain, call, whole=new.whole)
                    done += unit.nbytes
                    bar.update(done, total)
        except BaseException as err:
            lost = isinstance(err, WorkerDied | SessionLost)
            if model.books.broken is None and lost:
                model.books.broken = err
            elif model.books.broken is None:
                model.books.broken = CheckpointError(
                    f"loading ended half-way ({type(err).__name__}: {err}), the weights are mixed: make a new RoundPipe"
                )
                model.books.broken.__cause__ = err
            if lost or err is model.books.broken or not isinstance(err, Exception):
                raise
            raise model.books.broken from err
        if grad_scaler is not None and scaler is not None:
            grad_scaler._state, grad_scaler._previous_scale = from_dict(scaler)
        model.synchronize()
        model.loan.replaced(new.given)

    def _place(self, buffers: dict[int, dict[str, Any]], before: Callable[[], None]) -> list[tuple[int, Payload]]:
        client = self._client
        placed: list[TensorHandle] = []
        payloads = []
        try:
            for position, values in buffers.items():
                skeleton, tensors = take_apart(values)
                first = len(placed)
                for tensor in tensors:
                    placed.append(put_tensor(client, tensor))
                handles = tuple(placed[first:])
                payloads.append((position, Payload(skeleton, handles, (False,) * len(handles))))
            before()
        except BaseException:  # nothing has changed
            for handle in placed:
                client.arena.free(handle.extent)
            raise
        return payloads

    def _is_as_it_was(self, unit: UnitSpec, rows: list[Row], extent: Extent) -> bool:
        params = list(views_of(self._client.store, unit, extent).values())
        return all(_same_bits(params[index], value) for index, _, value in rows)

    def _restore_unit(
        self,
        unit: UnitSpec,
        rows: list[Row],
        values: dict[tuple[int, str], Any],
        request: int,
        *,
        whole: bool,
    ) -> None:
        client, model = self._client, self._model.number
        kept: list[TensorHandle] = []

        def put(index: int, name: str, value: torch.Tensor) -> tuple[int, str, TensorHandle]:
            if name == WEIGHT and unit.trainable:
                value = value.to(dtype_of(optimizer_dtype(unit.params[index].dtype)))
            kept.append(put_tensor(client, value))
            return index, name, kept[-1]

        try:
            handles = [put(*row) for row in rows]
            body = cloudpickle.dumps(values) if values else b""
            payload = None
            if len(body) > MAX_INLINE_SKELETON_BYTES:
                kept.append(client.arena.put_bytes(body))
                payload = Payload(kept[-1], (), ())
            elif body:
                payload = Payload(body, (), ())
            with client.lock:
                self._restored.discard(unit.index)
            for start in range(0, max(1, len(handles)), ROWS_A_MESSAGE):
                chunk = tuple(handles[start : start + ROWS_A_MESSAGE])
                last = start + ROWS_A_MESSAGE >= len(handles)
                keeps = whole and unit.trainable
                msg = RestoreUnitMsg(model, request, unit.index, chunk, payload if last else None, keeps, last)
                client.send("optimizer", msg)
            books = self._model.books
            client.wait(lambda: unit.index in self._restored or books.broken is not None, "a unit's new weights")
            if books.broken is not None:
                raise books.broken
        finally:
            for handle in kept:
                client.arena.free(handle.extent)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and (first.numel() == 0 or torch.equal(flat(first), flat(second)))
