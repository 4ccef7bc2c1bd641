"""Values of the optimizer process that the script asks for: state, gradients."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from rpruntime.store.arena import Store
from rpruntime.store.handle import Extent
from rpruntime.wire.messages import ReadStateMsg, StateMsg

if TYPE_CHECKING:
    from rpruntime.model import Model


def read_state(model: Model, request: int, what: str, calls: tuple[int, ...] = ()) -> dict[tuple[int, int, str], Any]:
    """By (unit, index, name); `what` as in `ReadStateMsg`, `request`: a number of its own."""
    parts: list[StateMsg] = []
    model.books.asked = (request, parts)
    model.client.send("optimizer", ReadStateMsg(model.number, request, what, calls))
    model.wait(lambda: bool(parts) and parts[-1].last, f"the optimizer's {what}")
    model.raise_failure()
    found: dict[tuple[int, int, str], Any] = {}
    for msg in parts:
        rows, extents = _rows(model.client.store, msg)
        found.update(rows)
        model.client.free(extents)
    return found


def _rows(store: Store, msg: StateMsg) -> tuple[dict[tuple[int, int, str], Any], set[Extent]]:
    """Copies of a part's values, and the extents to be freed after."""
    found: dict[tuple[int, int, str], Any] = {
        (unit, index, name): store.tensor(handle).clone() for unit, index, name, handle in msg.rows
    }
    extents = {handle.extent for *_, handle in msg.rows}
    if msg.payload is not None:
        found.update(pickle.loads(store.skeleton(msg.payload)))
        extents.update(msg.payload.extents())
    return found, extents
