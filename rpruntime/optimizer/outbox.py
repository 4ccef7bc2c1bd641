"""What the optimizer's machine tells its shell to do, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rpruntime.optimizer.events import Instruction, Send

CONTROLLER = "controller"
LAUNCHER = "launcher"
ROLE = "optimizer"


class Outbox:
    """Instructions that the shell has not been given yet.

    Args:
        workers: roles that want to know of new weights.
    """

    def __init__(self, workers: tuple[str, ...]) -> None:
        self._workers = workers
        self._instructions: list[Instruction] = []

    def add(self, instruction: Instruction) -> None:
        """Any instruction."""
        self._instructions.append(instruction)

    def send(self, role: str, msg: Any) -> None:
        """A message to one role."""
        self.add(Send(role, msg))

    def send_readers(self, msg: Any) -> None:
        """To everybody who wants to know of new weights."""
        for role in (*self._workers, CONTROLLER):
            self.send(role, msg)

    def retire(self, roles: Iterable[str]) -> None:
        """Nobody will fill these workers' roles again."""
        retired = frozenset(roles)
        self._workers = tuple(role for role in self._workers if role not in retired)

    def take(self) -> list[Instruction]:
        """All of them, once."""
        taken, self._instructions = self._instructions, []
        return taken
