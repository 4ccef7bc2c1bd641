"""Looking at a session without taking part: its state, and its models by name, version and step."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpruntime.errors import SessionLost
from rpruntime.store.segments import SegmentClient
from rpruntime.wire.mailbox import Mailbox
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
    role = f"observer-{os.getpid()}-{secrets.token_hex(4)}"
    public, secret = body["keys"]
    segments = SegmentClient(folder, body["token"], owner=f"{role}.1")
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
