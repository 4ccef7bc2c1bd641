"""Who may import what: pure parts load without torch and ZeroMQ, peers never load the controller."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKED = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
sys.modules["zmq"] = None
import importlib
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    [
        "rpruntime.schedule",
        *(f"rpruntime.schedule.{path.stem}" for path in (ROOT / "rpruntime/schedule").glob("[a-z]*.py")),
        "rpruntime.control.machine",
        "rpruntime.worker.machine",
        "rpruntime.optimizer.machine",
        "launcher.planning",
    ],
)
def test_loads_without_torch_and_zmq(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED, module], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_block_blocks() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED, "rpruntime.pipe"], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode != 0


@pytest.mark.parametrize("package", ["worker", "optimizer", "schedule"])
def test_never_imports_the_controller(package: str) -> None:
    for path in (ROOT / "rpruntime" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            controller = [name for name in names if f"{name}.".startswith("rpruntime.control.")]
            assert not controller, f"{path.name}:{getattr(node, 'lineno', 0)} imports {controller[0]}"
