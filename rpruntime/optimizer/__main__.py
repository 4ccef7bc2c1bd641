"""`python -m rpruntime.optimizer`: the optimizer process, started by the launcher."""

from __future__ import annotations

from rpruntime.process import start_child

child = start_child()  # before the heavy imports: from here on the process ends with its launcher

page = child.status_page()

import torch  # noqa: E402

from rpruntime.optimizer.shell import OptimizerShell  # noqa: E402
from rpruntime.store.arena import Arena, Store  # noqa: E402
from rpruntime.wire.messages import ShutdownMsg  # noqa: E402

IDLE_WAIT_S = 1.0


def main() -> None:
    """Serve until the launcher says stop or dies."""
    child.hello()
    torch.set_num_threads(int(child.config["optimizer_threads"]))
    arena = Arena(f"{child.role}.{child.incarnation}", child.segments, Store(child.segments))
    workers = tuple(f"worker-{index}" for index in range(len(child.config["devices"])))
    shell = OptimizerShell(child.mailbox, arena, workers)
    child.ready({"threads": torch.get_num_threads()})
    busy = False
    while True:
        messages = child.mailbox.receive(0.0 if busy else IDLE_WAIT_S)
        if any(isinstance(msg, ShutdownMsg) for msg in messages):
            break
        page.set_busy(busy or bool(messages))
        busy = shell.step(messages)
        page.set_busy(busy)
    child.end()


main()
