"""Train models larger than GPU memory: one script, one process per device, weights in shared memory.

Public names are loaded on first use (PEP 562), so that `import rpruntime` in a launcher or a child costs
neither torch nor ZeroMQ.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpruntime import losses, schedule
    from rpruntime.client import Client
    from rpruntime.errors import (
        CheckpointError,
        ConfigError,
        HostMemoryError,
        RoundPipeError,
        SessionLost,
        WorkerDied,
    )
    from rpruntime.iteration import Iteration, StageTask, TaskResult
    from rpruntime.model import Model
    from rpruntime.models.pretrained import from_pretrained
    from rpruntime.pipe import RoundPipe
    from rpruntime.scaler import GradScaler
    from rpruntime.schedule.plan import ExecutionPlan
    from rpruntime.seeds import layer_seed
    from rpruntime.session import Session, init

__version__ = "0.1.0"

_HOME = {
    "RoundPipe": "rpruntime.pipe",
    "from_pretrained": "rpruntime.models.pretrained",
    "Client": "rpruntime.client",
    "Model": "rpruntime.model",
    "Iteration": "rpruntime.iteration",
    "StageTask": "rpruntime.iteration",
    "TaskResult": "rpruntime.iteration",
    "init": "rpruntime.session",
    "Session": "rpruntime.session",
    "ExecutionPlan": "rpruntime.schedule.plan",
    "GradScaler": "rpruntime.scaler",
    "layer_seed": "rpruntime.seeds",
    "RoundPipeError": "rpruntime.errors",
    "ConfigError": "rpruntime.errors",
    "HostMemoryError": "rpruntime.errors",
    "WorkerDied": "rpruntime.errors",
    "SessionLost": "rpruntime.errors",
    "CheckpointError": "rpruntime.errors",
}
_SUBMODULES = ("losses", "schedule")

__all__ = [*_HOME, *_SUBMODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"rpruntime.{name}")
    if name in _HOME:
        from rpruntime.failures import install_excepthook

        install_excepthook()  # a script uses the package: our errors are shown without our lines
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rpruntime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
