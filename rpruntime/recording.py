"""Writing down what a machine was told and what it answered, so that a real run can be replayed without processes.

Set RPRUNTIME_RECORD to a folder: the controller, every worker and the optimizer append to one file each.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

VARIABLE = "RPRUNTIME_RECORD"


class Machine(Protocol):
    """A pure machine."""

    def handle(self, *events: Any) -> list[Any]: ...


def record(machine: Any, role: str) -> None:
    """From now on append (events, instructions) of each `handle` to FOLDER/ROLE.record, if a folder is set."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    file = (Path(folder) / f"{role}.record").open("wb")
    handle = machine.handle

    def recorded(*events: Any) -> list[Any]:
        instructions: list[Any] = handle(*events)
        if events or instructions:
            pickle.dump((events, instructions), file)
            file.flush()
        return instructions

    machine.handle = recorded


def read(path: Path) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """The recorded (events, instructions), in order; a last one that was cut off is left out."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


def replay(path: Path, machine: Machine) -> int:
    """Tell a fresh machine the same events; returns how many answers were compared.

    Raises:
        AssertionError: it answered something else.
    """
    count = 0
    for events, expected in read(path):
        got = machine.handle(*events)
        assert got == expected, f"answer {count} to {events} is {got}, in the recorded run it was {expected}"
        count += 1
    return count
