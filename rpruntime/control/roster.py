"""Which process fills which worker role, who takes part in calls, and which dead processes' memory is still read.

    living --RoleDied--> starting --RoleReady--> ready --everybody fenced--> living
                     \\-> retired

A *fence* is outstanding until the process asked has said that it takes nothing from a role's older process any more.
A *grave* is a dead process's arena. Messages that name its extents may come late, and late readers may hold them: it is
left alone until the calls that were known at the last death are over and every fence has been answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

OPTIMIZER = "optimizer"
"""The role that is no worker; there is one of it and it has no replacement."""


@dataclass(frozen=True)
class Grave:
    """The arena of a dead process (with those that it had adopted), and the calls that may name its extents."""

    role: str
    owners: tuple[str, ...]
    calls: frozenset[int]


class Roster:
    """The worker roles of a session.

    Args:
        workers: in device order.
        incarnations: of those whose first process has died, as all processes know.
        retired: those whom nobody will replace; all others are living.
    """

    def __init__(
        self, workers: Sequence[str], incarnations: Mapping[str, int] | None = None, retired: Iterable[str] = ()
    ) -> None:
        self.workers = tuple(workers)
        self.graves: list[Grave] = []
        self._incarnations = {role: (incarnations or {}).get(role, 1) for role in self.workers}
        self._ready: list[str] = []
        self._retired = set(retired)
        self.living = tuple(role for role in self.workers if role not in self._retired)
        self._inherited: dict[str, tuple[str, ...]] = dict.fromkeys(self.workers, ())
        """The dead whose arenas the present process was told to adopt."""
        self._fences: set[tuple[str, str]] = set()  # (by, role)

    @property
    def expected(self) -> tuple[str, ...]:
        """The living, or all that will be again if nobody is."""
        return self.living or tuple(role for role in self.workers if role not in self._retired)

    def incarnation(self, role: str) -> int:
        """The number of the process that fills a role or will."""
        return self._incarnations[role]

    def is_retired(self, role: str) -> bool:
        """Whether nobody will fill a role again."""
        return role in self._retired

    def is_away(self, role: str) -> bool:
        """Whether a worker role takes no part at present."""
        return role in self._incarnations and role not in self.living

    def is_dead(self, owner: str) -> bool:
        """Whether an arena's owner has died."""
        role, _, number = owner.rpartition(".")
        return role in self._incarnations and int(number) < self._incarnations[role]

    def bury(self, role: str, incarnation: int, restarts: bool, calls: Iterable[int]) -> bool:
        """A worker's process has died; False: an older one, which is known."""
        if incarnation < self._incarnations.get(role, incarnation + 1):
            return False
        known = frozenset(calls)
        # a late message of somebody who dies later may name an old grave's extents under a key of a newer call
        self.graves = [replace(grave, calls=grave.calls | known) for grave in self.graves]
        earlier = range(self._incarnations[role], incarnation + 1)  # more than one: before the controller attached
        owners = (*(f"{role}.{number}" for number in earlier), *self._inherited[role])
        self._inherited[role] = ()
        self.graves.append(Grave(role, owners, known))
        self._incarnations[role] = incarnation + 1
        self.living = tuple(other for other in self.living if other != role)
        self._ready = [other for other in self._ready if other != role]
        self._fences = {(by, about) for by, about in self._fences if by != role}
        if not restarts:
            self._retired.add(role)
        return True

    def to_fence(self) -> tuple[str, ...]:
        """The workers that can be asked to fence somebody."""
        return (*self.living, *self._ready)

    def fence(self, by: str, role: str) -> None:
        """`by` is asked to fence `role`."""
        self._fences.add((by, role))

    def fenced(self, by: str, role: str, incarnation: int) -> None:
        """`by` has answered."""
        if incarnation == self._incarnations.get(role):
            self._fences.discard((by, role))

    def ready(self, role: str, incarnation: int) -> bool:
        """A replacement takes work; False: this was known, or it is no replacement."""
        if incarnation == 1 or incarnation != self._incarnations.get(role) or role in self.to_fence():
            return False
        self._ready.append(role)
        return True

    def replaced(self) -> tuple[str, ...]:
        """Roles whose first process is gone."""
        return tuple(role for role in self.workers if self._incarnations[role] > 1)

    def joining(self) -> list[str]:
        """Replacements that nobody has to be asked about any more."""
        return [role for role in self._ready if not any(role in fence for fence in self._fences)]

    def join(self, role: str) -> None:
        """A replacement takes part from now on."""
        self._ready.remove(role)
        self.living = tuple(other for other in self.workers if other in self.living or other == role)

    def silent_graves(self, running: Iterable[int], owners: set[str]) -> list[Grave]:
        """Graves that nobody reads any more and that somebody can have; they are forgotten.

        Args:
            running: the calls that are not over, or that left something which is still read.
            owners: of all live extents.
        """
        running = frozenset(running)
        if self._fences:
            return []
        silent = [
            grave
            for grave in self.graves
            if not owners.intersection(grave.owners)
            and not grave.calls & running
            and (grave.role in self.living or grave.role in self._retired)
        ]
        self.graves = [grave for grave in self.graves if grave not in silent]
        for grave in silent:
            self._inherited[grave.role] += grave.owners
        return silent
