"""What the terminal shows of an exception that was raised in another process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import rpruntime
from rpruntime import ExecutionPlan
from rpruntime.errors import ConfigError
from rpruntime.failures import format_error, install_excepthook, rebuild
from rpruntime.wire.messages import ErrorInfo

ROOT = Path(__file__).resolve().parent.parent
DROPPED = "this iteration's gradients dropped, run usable"


def info(err: BaseException, frames: tuple[tuple[str, int, str, str], ...] = (), **place: object) -> ErrorInfo:
    settings: dict[str, object] = {"phase": "forward", "layer": 0, "layer_name": "0 (Linear)", "microbatch": 0, **place}
    return ErrorInfo(pickle.dumps(err), type(err).__name__, str(err), "the whole text", frames, **settings)  # type: ignore[arg-type]


def shown(err: BaseException, *frames: tuple[str, int, str, str], debug: bool = False, **place: object) -> list[str]:
    return format_error(rebuild(info(err, frames, **place), 4, 7), None, debug=debug).splitlines()


def test_error_and_context() -> None:
    lines = shown(ValueError("bad value"), device="cuda:1", log_file="/x/worker-1.log")
    assert lines == [
        "ValueError: bad value",
        f"  layer 0 (Linear), forward, micro-batch 1/4, step 7, cuda:1 | {DROPPED} | log /x/worker-1.log",
    ]


def test_a_note_stands_after_the_error() -> None:
    err = rebuild(info(ValueError("bad\nvalue")), 4, 7)
    err.add_note("2 step(s) issued after it were cancelled")  # type: ignore[attr-defined]
    assert format_error(err, None).splitlines()[:3] == [
        "ValueError: bad",
        "value",
        "2 step(s) issued after it were cancelled",
    ]


def test_a_note_is_shown_where_python_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceback.format_exception_only", lambda kind, err: [f"{kind.__name__}: {err}\n"])
    err = rebuild(info(ValueError("bad")), 4, 7)
    err.add_note("2 step(s) were cancelled")  # type: ignore[attr-defined]
    assert format_error(err, None).splitlines()[:2] == ["ValueError: bad", "2 step(s) were cancelled"]


def test_a_syntax_error_is_shown_whole() -> None:
    lines = shown(SyntaxError("odd", ("x.py", 3, 1, "a b", 3, 2)))
    assert lines[-2] == "SyntaxError: odd"
    assert any("a b" in line for line in lines)


@pytest.mark.parametrize(
    "layer, name, words",
    [(0, "0 (Linear)", "layer 0 (Linear)"), (10, "1 (Linear)", "layer 10 1 (Linear)"), (2, "head (Head)", "2 head")],
)
def test_name_of_the_layer(layer: int, name: str, words: str) -> None:
    assert words in shown(ValueError(), layer=layer, layer_name=name)[-1]


@pytest.mark.parametrize(
    "phase, words",
    [
        ("forward", DROPPED),
        ("backward", DROPPED),
        ("loss", DROPPED),
        ("evaluation", "training state untouched, run usable"),
        ("step", "this pipe cannot go on"),
    ],
)
def test_outcome(phase: str, words: str) -> None:
    assert f"| {words}" in shown(ValueError(), phase=phase)[-1]
    assert (DROPPED in shown(ValueError(), phase=phase)[-1]) == (words == DROPPED)


def test_frames() -> None:
    site = "/opt/venv/lib/python3.11/site-packages"
    frames = (
        (f"{site}/torch/nn/modules/module.py", 1778, "_call_impl", "return forward_call(*args)"),
        (os.path.join(os.getcwd(), "model.py"), 12, "forward", "return self.linear(x)"),
        (f"{site}/torch/autograd/function.py", 3, "apply", "return user_fn(self, *args)"),
        (f"{site}/torch/nn/modules/linear.py", 134, "forward", "return F.linear(input, self.weight)"),
    )
    lines = shown(ValueError("bad"), *frames, device="cpu:1")
    assert lines[:-2] == [
        "  model.py:12   in forward: return self.linear(x)   [cpu:1]",
        "  torch/nn/modules/linear.py:134   in forward: return F.linear(input, self.weight)   [cpu:1]",
    ]
    everything = shown(ValueError("bad"), *frames, device="cpu:1", debug=True)
    assert "torch/nn/modules/module.py:1778" in everything[0]
    assert "the whole text" in everything


def test_code_that_travelled_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("class Layer:\n    def forward(self, x):\n        return x @ x\n\nvalue = 3\n")
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(tmp_path)
    lines = shown(
        ValueError("bad"),
        ("<dynamic-code>", 3, "forward", ""),  # the script's
        ("<dynamic-code>", 5, "forward", ""),  # not the script's: no such function there
        ("<dynamic-code>", 3, "other", ""),
        (str(script), 3, "forward", ""),
        ("/gone/file.py", 3, "forward", ""),
        device="cpu:1",
    )
    assert lines[:-2] == [
        "  train.py:3   in forward: return x @ x   [cpu:1]",
        "  line 5   in forward   [cpu:1]",
        "  line 3   in other   [cpu:1]",
        "  train.py:3   in forward: return x @ x   [cpu:1]",
        "  /gone/file.py:3   in forward   [cpu:1]",
    ]


def test_without_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert shown(ValueError("bad"), ("<dynamic-code>", 3, "forward", ""))[0] == "  line 3   in forward"


# --- the hook of uncaught exceptions


def _raise_from_ours(err: BaseException) -> None:
    """As a call of the package does that hands a worker's exception to the script."""
    names: dict[str, Any] = {}
    file = Path(rpruntime.__file__).parent / "pipe.py"
    exec(compile("def wait(err):\n    raise err", str(file), "exec"), names)
    names["wait"](err)


def _uncaught(how: str) -> BaseException:
    """What a script lets through that meets an exception of its layer."""
    err = rebuild(info(ValueError("bad"), ((__file__, 1, "forward", "x @ x"),), device="cpu:1"), 4, 7)
    try:
        try:
            _raise_from_ours(err)
        except ValueError as caught:
            if how == "from":
                raise RuntimeError("in epoch 3") from caught
            if how == "beside":
                raise RuntimeError("in epoch 3")  # noqa: B904
            if how == "instead":
                raise RuntimeError("in epoch 3") from None
            raise
    except Exception as found:
        return found
    raise AssertionError


def _shown_by_the_hook(err: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install_excepthook()
    sys.excepthook(type(err), err, err.__traceback__)
    return capsys.readouterr().err


def test_an_uncaught_one_is_shown_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = _shown_by_the_hook(_uncaught("as it is"), monkeypatch, capsys)
    assert "pipe.py" not in text and "in _raise_from_ours" in text and "layer 0 (Linear), forward" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 shows no notes")
@pytest.mark.parametrize("how", ["from", "beside"])
def test_one_that_another_was_raised_from_is_shown_with_its_place(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    err = _uncaught(how)
    for _ in range(2):  # a script may show it itself, and let it through
        text = _shown_by_the_hook(err, monkeypatch, capsys)
        assert text.endswith("RuntimeError: in epoch 3\n") and "_raise_from_ours" in text
        assert "pipe.py" not in text, "none of our lines"
        assert text.count("in forward: x @ x   [cpu:1]\n  layer 0 (Linear), forward, micro-batch 1/4, step 7") == 1
    monkeypatch.setenv("RPRUNTIME_DEBUG", "1")
    assert "pipe.py" in _shown_by_the_hook(_uncaught(how), monkeypatch, capsys)


def test_one_that_is_not_to_be_shown_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "ValueError" not in _shown_by_the_hook(_uncaught("instead"), monkeypatch, capsys)


@pytest.mark.parametrize("line", ["rp.init('cpu:x')", "rp.ExecutionPlan([range(0, 2)], [range(3, 4)])"])
def test_an_error_before_the_first_pipe_is_shown_without_our_lines(line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import rpruntime as rp\n{line}\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=60)
    lines = run.stderr.splitlines()
    assert [text for text in lines if "File" in text] == [f'  File "{script}", line 2, in <module>']
    assert lines[-1].startswith("rpruntime.errors.ConfigError: ")


def test_a_chain_that_goes_round(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, last = ValueError("a"), ValueError("b"), RuntimeError("last")
    first.__cause__, second.__cause__, last.__cause__ = second, first, first
    assert "RuntimeError: last" in _shown_by_the_hook(last, monkeypatch, capsys)


def test_an_error_of_ours_is_shown_once_and_without_our_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def uncaught() -> ConfigError:
        try:
            try:
                ExecutionPlan.one_layer_a_stage(3).check_covers(2)
            finally:  # as closing does
                ExecutionPlan.one_layer_a_stage(4).check_covers(2)
        except ConfigError as err:
            return err
        raise AssertionError

    text = _shown_by_the_hook(uncaught(), monkeypatch, capsys)
    assert text.count("ConfigError") == 1 and "the plan has 4 layers" in text
    assert "in uncaught" in text and "plan.py" not in text
    monkeypatch.setenv("RPRUNTIME_DEBUG", "1")
    text = _shown_by_the_hook(uncaught(), monkeypatch, capsys)
    assert text.count("rpruntime.errors.ConfigError") == 2 and "plan.py" in text
