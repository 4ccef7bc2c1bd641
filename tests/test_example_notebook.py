"""examples/notebook.ipynb, cell by cell, in two processes as a restarted kernel is.

pytest tests/test_example_notebook.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.launching import ROOT
from tests.leaks import no_leaks

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
NAME = f"notebook-test-{os.getpid()}"


def kernels() -> list[str]:
    """The code of each kernel's life: a cell with the tag "restart" begins a new one; "wrap" is run twice."""
    found: list[list[str]] = [[]]
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None, "the notebook is kept without outputs"
        tags = cell["metadata"].get("tags", [])
        if "restart" in tags:
            found.append([])
        found[-1] += ["".join(cell["source"])] * (2 if "wrap" in tags else 1)
    return ["\n".join(cells) for cells in found]


def test_the_notebook_runs_and_goes_on_after_its_kernel_has_ended(tmp_path: Path) -> None:
    first, second = kernels()
    with no_leaks() as watch:
        environ = {**os.environ, **watch.environ, "NOTEBOOK_SESSION": NAME, "PYTHONPATH": str(ROOT)}
        log_dir = tmp_path / "logs"
        environ["RPRUNTIME_LOG_DIR"] = str(log_dir)
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"

        def run(code: str) -> subprocess.CompletedProcess[str]:
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
            )
            assert done.returncode == 0, done.stderr
            return done

        try:
            before = run(first)
            assert "the older one is closed" in before.stderr  # the cell that was run again
            losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", before.stdout)]
            assert len(losses) == 3 and losses[-1] < losses[0]
            assert "computing" in before.stdout and (tmp_path / "trace.svg").exists()
            after = run(second)
            assert "step 32, {'epoch': 2}" in after.stdout
            assert float(re.findall(r"loss (\d+\.\d+)", after.stdout)[0]) < losses[-1]
            assert "parameters, step 42" in after.stdout
        finally:
            stop = ["rpctl", "stop", NAME]
            subprocess.run(stop, env=environ, capture_output=True, timeout=60)  # it is gone already, as a rule
