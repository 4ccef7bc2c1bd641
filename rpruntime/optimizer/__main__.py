"""`python -m rpruntime.optimizer`: the optimizer process. The launcher's fork server calls `main` instead."""

from __future__ import annotations

from rpruntime.process import start_child
from rpruntime.status import start_heartbeat


def main() -> None:
    """From a process's first line to its last."""
    child = start_child()  # before the heavy imports: from here on the process ends with its launcher
    page = child.status_page()
    start_heartbeat(page)
    from rpruntime.optimizer.run import run

    run(child, page)


if __name__ == "__main__":
    main()
