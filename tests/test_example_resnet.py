"""The example that is not a transformer, `examples/train_resnet.py`, in real processes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.launching import LAUNCH, ROOT, Run
from tests.leaks import no_leaks

EXAMPLE = ROOT / "examples" / "train_resnet.py"
RESULT = re.compile(
    r"trained (?P<steps>\d+) steps in [\d.]+ s\n"
    r"validation loss (?P<loss>\d\.\d{3}), accuracy (?P<accuracy>\d\.\d{3}) of (?P<pictures>\d+) pictures\n"
)


def _run(folder: Path, *words: str) -> dict[str, float]:
    """The numbers that it printed."""
    with no_leaks() as watch:
        run = Run(folder, watch, [*LAUNCH, "--devices=cpu:2", str(EXAMPLE), *words], RPRUNTIME_CHILD_COMMAND="")
        watch.folders.add(run.folder)
        assert run.wait(110) == 0, run.err
        found = RESULT.fullmatch(run.out)
        assert found is not None, (run.out, run.err)
        return {name: float(value) for name, value in found.groupdict().items()}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_resnet", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_resnet"] = module
    spec.loader.exec_module(module)
    return module


def test_learns_and_saves_its_statistics(tmp_path: Path, example: ModuleType) -> None:
    results = _run(tmp_path, "--epochs=2", "--num-microbatches=2", "--save=digits.pt")
    assert results["steps"] == 2 * 23
    assert results["pictures"] == 359
    assert results["accuracy"] > 0.9

    saved = torch.load(tmp_path / "digits.pt")
    counts = {int(value) for name, value in saved.items() if name.endswith("num_batches_tracked")}
    assert counts == {2 * 23 * 2}  # every micro-batch once
    for name, value in saved.items():
        assert torch.isfinite(value).all(), name
        if name.endswith("running_var"):
            assert (value > 0).all() and (value != 1).any(), name
        if name.endswith("running_mean"):
            assert (value != 0).any(), name

    # Elsewhere, with plain torch, the saved model gives what was printed.
    model = example.make_model(16)
    model.load_state_dict(saved)
    model.eval()
    _, (images, labels) = example.read_digits(0)
    with torch.no_grad():
        loss, metrics = example.loss_fn(model(images), labels)
    assert float(metrics["accuracy"]) == pytest.approx(results["accuracy"], abs=1e-3)
    assert float(loss) == pytest.approx(results["loss"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--asynchronous", "--lr=0.05"]], ids=["synchronous", "asynchronous"])
def test_accuracy_by_default(tmp_path: Path, words: list[str]) -> None:
    assert _run(tmp_path, *words)["accuracy"] > 0.95
