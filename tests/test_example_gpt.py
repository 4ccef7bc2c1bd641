"""The example that newcomers run first, `examples/train_gpt.py`, in real processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import LAUNCH, ROOT, Run
from leaks import Watch, no_leaks, wait_until

EXAMPLE = str(ROOT / "examples" / "train_gpt.py")
TINY = ["--layers=2", "--width=32", "--context=32", "--batch-size=8", "--num-microbatches=2"]
REAL_CHILDREN = {"RPRUNTIME_CHILD_COMMAND": "", "RPRUNTIME_DEVICES": ""}
RESULT = re.compile(
    r"trained (?P<steps>\d+) steps, (?P<bytes>[\d,]+) bytes, in [\d.]+ s; "
    r"training loss (?P<training>\d+\.\d+) nats per byte\n"
    r"validation loss (?P<validation>\d+\.\d+) nats per byte\n(?:\n(?P<sample>.*))?",
    re.DOTALL,
)


def _launch(folder: Path, watch: Watch, *words: str) -> Run:
    return Run(folder, watch, [*LAUNCH, "--devices=cpu:2", EXAMPLE, *words], **REAL_CHILDREN)


def _results(run: Run) -> dict[str, str]:
    found = RESULT.fullmatch(run.out)
    assert found is not None, (run.out, run.err)
    return found.groupdict()


def _losses(run: Run) -> list[float]:
    """The losses of the progress lines."""
    return [float(text) for text in re.findall(r"^step \d+  loss (\d+\.\d+)  ", run.err, re.MULTILINE)]


def test_learns_and_writes(tmp_path: Path) -> None:
    with no_leaks() as watch:
        run = _launch(tmp_path, watch, *TINY, "--steps=40", "--lr=1e-2", "--prompt=abc", "--generate=20")
        assert run.wait(100) == 0, run.err
        results = _results(run)
        assert (results["steps"], results["bytes"]) == ("40", "10,240")
        assert float(results["training"]) < 4.5  # untrained: 5.5
        assert float(results["validation"]) < 4.5
        assert results["sample"].startswith("abc")
        assert len(results["sample"]) == len("abc") + 20 + len("\n")
        assert "step 1  loss -" in run.err
        assert "Traceback" not in run.err
        assert run.session  # the folder is watched from here on


@pytest.mark.parametrize("more", [["--plan=whole", "--asynchronous"], ["--plan=layers", "--dtype=bfloat16"]])
def test_other_ways_to_run_it(tmp_path: Path, more: list[str]) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    with no_leaks() as watch:
        run = _launch(tmp_path, watch, *TINY, "--steps=30", "--lr=1e-2", "--generate=0", f"--data={text}", *more)
        assert run.wait(100) == 0, run.err
        results = _results(run)
        assert float(results["validation"]) < 4.0
        assert results["sample"] is None
