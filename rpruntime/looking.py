"""Looking at a session without taking part: its state, and its models by name, version and step."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpruntime.errors import RoundPipeError, SessionLost
from rpruntime.served import read_session
from rpruntime.store.segments import SegmentClient
from rpruntime.wire.mailbox import OBSERVER, Mailbox
from rpruntime.wire.succession import ModelsMsg, ReadModelsMsg


@dataclass(frozen=True)
class Seen:
    """A session at one moment."""

    models: list[dict[str, Any]]
    """`name`, `version`, `step`, `num_calls` of each."""
    memory_bytes: dict[str, int]
    """Shared memory by who made it."""


def look_at(folder: Path, body: dict[str, Any], timeout_s: float) -> Seen:
    """Ask a session's launcher and optimizer. `body`: its session.json.

    Raises:
        SessionLost: nobody answers.
    """
    role = f"{OBSERVER}{os.getpid()}-{secrets.token_hex(4)}"
    public, secret = body["keys"]
    segments = SegmentClient(folder, body["token"], owner=f"{role}.1", timeout_s=timeout_s)
    try:
        memory = segments.held_bytes()
    finally:
        segments.close()
    post = Mailbox(folder, role, 1, (public, secret))
    try:
        post.send("optimizer", ReadModelsMsg(role))
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for msg in post.receive(left):
                if isinstance(msg, ModelsMsg):
                    return Seen([_shown(row) for row in msg.models], memory)
    finally:
        post.close()
    raise SessionLost(f"the optimizer of session {folder.name} did not answer within {timeout_s:g} s")


def _shown(row: Any) -> dict[str, Any]:
    return {"name": row.name, "version": row.version, "step": row.step, "num_calls": row.num_calls}


class Observation:
    """A session that is looked at: `rp.Client.attach(observe=True)`. Nothing can be submitted through it.

    Attributes:
        name: of the session.
        folder: of the session.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.name, self.folder = folder.name, folder
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<Observation of {self.name}>"

    def _body(self) -> dict[str, Any]:
        body = read_session(self.folder)
        if body is None:
            raise SessionLost(f"session {self.name} has ended")
        return body

    def status(self) -> dict[str, Any]:
        """`devices`, `roles` (by name: pid, device, state), `controller` (None, or pid, argv, since), `models`,
        `memory_bytes`."""
        body = self._body()
        seen = look_at(self.folder, body, self._timeout_s)
        return {
            "name": self.name,
            "devices": body["config"]["devices"],
            "roles": body["roles"],
            "controller": body.get("controller"),
            "models": seen.models,
            "memory_bytes": sum(seen.memory_bytes.values()),
        }

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """By name: `version`, `step` and `num_calls`, as they are now."""
        return {row["name"]: row for row in look_at(self.folder, self._body(), self._timeout_s).models}

    def load_model(self, *_: Any, **__: Any) -> None:
        """Refused."""
        raise RoundPipeError("an observer only looks: attach without observe=True to load or train models")

    def detach(self, wait: bool = True) -> None:
        """Nothing is held."""

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()
