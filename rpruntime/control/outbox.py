"""What the controller's machine tells its shell to do, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rpruntime.control.events import FreeOwn, Instruction, Send
from rpruntime.control.roster import OPTIMIZER, Roster
from rpruntime.store.handle import Extent, by_owner, role_of
from rpruntime.wire.messages import FreeMsg


class Outbox:
    """Instructions that the shell has not been given yet.

    Args:
        roster: who can be sent something, and whose extents can be freed.
        owner: name under which the controller's own arena allocates.
    """

    def __init__(self, roster: Roster, owner: str) -> None:
        self.owner = owner
        self._roster = roster
        self._instructions: list[Instruction] = []

    def add(self, instruction: Instruction) -> None:
        """Any instruction."""
        self._instructions.append(instruction)

    def send(self, role: str, msg: Any) -> None:
        """A worker that takes no part is sent nothing: it is told everything when it joins."""
        if not self._roster.is_away(role):
            self.add(Send(role, msg))

    def send_workers(self, msg: Any) -> None:
        """To every worker that takes part."""
        for role in self._roster.living:
            self.send(role, msg)

    def send_all(self, msg: Any) -> None:
        """To every worker that takes part and to the optimizer."""
        self.send_workers(msg)
        self.send(OPTIMIZER, msg)

    def free(self, extents: Iterable[Extent]) -> None:
        """Whoever allocated them frees them; a dead process's arena goes as a whole."""
        for owner, freed in by_owner(extents).items():
            if owner == self.owner:
                self.add(FreeOwn(freed))
            elif not self._roster.is_dead(owner):
                self.send(role_of(owner), FreeMsg(freed))

    def take(self) -> list[Instruction]:
        """All of them, once."""
        taken, self._instructions = self._instructions, []
        return taken
