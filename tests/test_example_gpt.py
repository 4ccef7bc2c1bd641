"""The example that newcomers run first, `examples/train_gpt.py`, in real processes."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.launching import LAUNCH, ROOT, Run
from tests.leaks import Watch, no_leaks, wait_until

EXAMPLE = ROOT / "examples" / "train_gpt.py"
TINY = ["--layers=2", "--width=32", "--context=32", "--batch-size=8", "--num-microbatches=2", "--lr=1e-2"]
RESULT = re.compile(
    r"trained (?P<steps>\d+) steps, (?P<bytes>[\d,]+) bytes, in [\d.]+ s; "
    r"training loss (?P<training>\d+\.\d+) nats per byte\n"
    r"validation loss (?P<validation>\d+\.\d+) nats per byte\n(\n(?P<sample>.*)\n)?",
    re.DOTALL,
)


def _run(folder: Path, watch: Watch, command: list[str], *words: str) -> Run:
    run = Run(folder, watch, [*command, str(EXAMPLE), *words], RPRUNTIME_CHILD_COMMAND="")
    watch.folders.add(run.folder)
    return run


def _results(run: Run) -> dict[str, str]:
    """The parts of what was printed on stdout."""
    found = RESULT.fullmatch(run.out)
    assert found is not None, (run.out, run.err)
    return found.groupdict()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "fox.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return file


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*LAUNCH, "--devices=cpu:2"], id="rplaunch", marks=pytest.mark.slow),
        pytest.param([sys.executable], id="python"),
    ],
)
def test_learns_and_writes(tmp_path: Path, text: Path, command: list[str]) -> None:
    with no_leaks() as watch:
        words = [*TINY, f"--data={text}", "--steps=200", "--prompt=the q", "--generate=20"]
        run = _run(tmp_path, watch, command, *words)
        assert run.wait(100) == 0, run.err
        results = _results(run)
        assert (results["steps"], results["bytes"]) == ("200", "51,200")
        assert float(results["training"]) < 3.5  # untrained: 5.5
        assert float(results["validation"]) < 3.5
        assert results["sample"].startswith("the q")
        assert len(results["sample"]) == len("the q") + 20
        assert re.search(r"^step 1  0 s$", run.err, re.MULTILINE)
        # said every two seconds, and 200 steps take several
        assert re.search(
            r"^(step \d+  loss [\d.]+  [\d,]+ tokens/s|validation batch .*)  \d+ s$", run.err, re.MULTILINE
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["--plan=whole", "--asynchronous"], ["--plan=layers", "--dtype=bfloat16"]],
)
def test_other_ways_to_run_it(tmp_path: Path, text: Path, more: list[str]) -> None:
    with no_leaks() as watch:
        words = [*TINY, f"--data={text}", "--steps=40", "--generate=0", *more]
        run = _run(tmp_path, watch, [*LAUNCH, "--devices=cpu:2"], *words)
        assert run.wait(100) == 0, run.err
        assert float(_results(run)["validation"]) < 3.5
        assert _results(run)["sample"] is None


def test_interrupted(tmp_path: Path, text: Path) -> None:
    with no_leaks() as watch:
        run = _run(tmp_path, watch, [*LAUNCH, "--devices=cpu:2"], *TINY, f"--data={text}", "--minutes=5")
        wait_until(lambda: "\nstep 1 " in run.err, 60.0, "the first step")
        run.kill_group(signal.SIGINT)
        assert run.wait(30) == 130
        assert "Traceback" not in run.err
        assert run.err.endswith("train_gpt.py: interrupted\n")
        assert run.out == ""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--data", "missing.txt"], "cannot read missing.txt: No such file or directory"),
        (["--data", "."], "cannot read .: Is a directory"),
        (["--data", "empty.txt"], "the text is empty"),
        (["--data", "short.txt"], "give at least 1,290 bytes or a smaller --context"),
        (["--context", "50000"], "give at least 500,010 bytes or a smaller --context"),
        (["--width", "100", "--heads", "3"], "--width 100 cannot be divided among --heads 3"),
        (["--steps", "0"], "--steps: 0 is not a positive number"),
        (["--lr", "nan"], "--lr: nan is not a positive number"),
        (["--layers", "many"], "--layers: invalid count value: 'many'"),
    ],
)
def test_wrong_input(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    """One clear line before any process is started."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("x" * 1000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *words])
    with pytest.raises(SystemExit) as exit_:
        example.main()
    last_line = str(exit_.value.code) if exit_.value.code != 2 else capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("train_gpt.py: ")
    assert sentence in last_line
    assert "\n" not in last_line


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_default_settings(tmp_path: Path) -> None:
    """What the README promises; on idle cores it takes about a minute."""
    with no_leaks() as watch:
        begin = time.monotonic()
        run = _run(tmp_path, watch, LAUNCH)
        assert run.wait(270) == 0, run.err
        seconds = time.monotonic() - begin
        assert float(_results(run)["validation"]) < 1.9
        assert seconds < 240
