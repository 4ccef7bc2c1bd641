"""`devices="inline"`: the same machines in the script's own process, for debuggers, hooks and prints.

Messages are handed over directly, memory is private, there is no child and no thread. A call has completed before it
returns; staleness arithmetic and numbers are those of a session with processes.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpruntime.optimizer.shell import OptimizerShell
from rpruntime.store.arena import Arena, Store
from rpruntime.store.segments import PrivateSegments
from rpruntime.worker.shell import WorkerShell
from rpruntime.worker.transfers import CpuTransfers, CudaTransfers, DelayedTransfers, Transfers
from rpruntime.worker.windows import PIECE_BYTES, WINDOW_BYTES, WindowSizes

CONTROLLER = "controller"


class _Post:
    """A mailbox that is a list in this process."""

    def __init__(self, role: str, hub: dict[str, deque[Any]]) -> None:
        self.role = role
        self._hub = hub
        hub[role] = deque()

    def send(self, role: str, msg: Any) -> None:
        if role in self._hub:
            self._hub[role].append(msg)

    def receive(self, timeout_s: float = 0.0) -> list[Any]:
        messages = list(self._hub[self.role])
        self._hub[self.role].clear()
        return messages

    def close(self) -> None:
        self._hub.pop(self.role, None)


class InlineSession:
    """A session without processes. `config["workers"]` (tests) sets the number of workers, 1 by default;
    `config["delayed_copies"]` (tests) makes copies late and out of order, with that seed; `config["window_bytes"]`
    (tests) spreads weights and gradients over micro-batches from that size on."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.name = str(config.get("name") or "inline")
        self.config = config
        self.closed = False
        self.folder: Path | None = None
        self.segments = PrivateSegments()
        self.under_rplaunch = False
        self.served = False
        self.backlog: list[Any] = []
        count = int(config.get("workers", 1))
        self.worker_roles = tuple(f"worker-{index}" for index in range(count))
        self.devices = ("cuda:0" if torch.cuda.is_available() else "cpu:0",)
        self.ready: dict[str, dict[str, Any]] = {role: {} for role in (*self.worker_roles, "optimizer")}
        hub: dict[str, deque[Any]] = {}
        self.post = _Post(CONTROLLER, hub)
        optimizer = _Post("optimizer", hub)
        self._optimizer = (optimizer, OptimizerShell(optimizer, self._arena("optimizer.1"), self.worker_roles))
        self._workers = []
        window = int(config.get("window_bytes", WINDOW_BYTES))
        sizes = WindowSizes(min(PIECE_BYTES, max(1, window // 2)), window)
        for index, role in enumerate(self.worker_roles):
            post = _Post(role, hub)
            shell = WorkerShell(
                post, self._arena(f"{role}.1"), self._transfers(index), self.worker_roles, self.devices[0], sizes=sizes
            )
            self._workers.append((post, shell))

    def _arena(self, owner: str) -> Arena:
        return Arena(owner, self.segments, Store(self.segments))

    def _transfers(self, index: int) -> Transfers:
        if self.devices[0].startswith("cuda"):
            return CudaTransfers(time.monotonic)
        if self.config.get("delayed_copies") is not None:
            return DelayedTransfers(time.monotonic, seed=int(self.config["delayed_copies"]) + index)
        return CpuTransfers(time.monotonic)

    def wait_ready(self, progress: Any = None) -> None:
        """Everything is here at once."""

    def launcher_alive(self) -> bool:
        """There is none to lose."""
        return True

    @torch.inference_mode(False)
    def drive(self) -> bool:
        """Let every role do one thing; False: nobody had anything to do. The script's random state is put back."""
        states: list[tuple[Callable[[Any], Any], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
        ]
        states.append((np.random.set_state, np.random.get_state()))
        if torch.cuda.is_initialized():
            states.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
        busy = False
        try:
            roles: list[tuple[_Post, WorkerShell | OptimizerShell]] = [self._optimizer, *self._workers]
            for post, shell in roles:
                messages = post.receive()
                busy = shell.step(messages) or bool(messages) or busy
            return busy or any(shell.is_waiting_for_copies for _, shell in self._workers)
        finally:
            for put_back, state in states:
                put_back(state)

    def close(self) -> None:
        """Drop everything."""
        if self.closed:
            return
        self.closed = True
        client = getattr(self, "client", None)
        if client is not None:
            client.close()
        self.segments.close()
        self.post.close()

    def __enter__(self) -> InlineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
