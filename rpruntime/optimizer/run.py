"""What the optimizer process does, from its heavy imports on."""

from __future__ import annotations

import importlib

import torch

from rpruntime.optimizer.shell import OptimizerShell
from rpruntime.process import Child
from rpruntime.status import StatusPage
from rpruntime.store.arena import Arena, Store
from rpruntime.wire.messages import ShutdownMsg

IDLE_WAIT_S = 1.0


def run(child: Child, page: StatusPage) -> None:
    """Serve until the launcher says stop or dies."""
    child.hello()
    torch.set_num_threads(int(child.config["optimizer_threads"]))
    arena = Arena(f"{child.role}.{child.incarnation}", child.segments, Store(child.segments))
    workers = tuple(f"worker-{index}" for index in range(len(child.config["devices"])))
    shell = OptimizerShell(child.mailbox, arena, workers, status=page)
    child.ready({"threads": torch.get_num_threads()})
    # Seconds, which the first optimizer that is made would take: now the script is still importing too. Who wants this
    # process to end meanwhile sends SIGTERM, as it reads no messages.
    importlib.import_module("torch._dynamo")

    busy = False
    while True:
        messages = child.mailbox.receive(0.0 if busy else IDLE_WAIT_S)
        if any(isinstance(msg, ShutdownMsg) for msg in messages):
            break
        page.set_busy(busy or bool(messages))
        busy = shell.step(messages)
        page.set_busy(busy)
    child.end()
