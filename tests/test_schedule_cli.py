"""rpctl plan and rpctl simulate."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import rpctl
from rpruntime.schedule import ExecutionPlan

TIMES = str(Path(__file__).resolve().parent.parent / "scripts/data/layer_times_h200.json")
SMALL = ["--forward-ms", "1*6,2", "--backward-ms", "3*6,6", "--devices", "2", "--microbatches", "4"]


def test_plan_prints_stages_and_what_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", TIMES, "--model", "llama-3.1-8b", "--link-gb-per-s", "55", "--devices", "4"]
    assert rpctl.main(words) == 0
    printed = capsys.readouterr().out
    assert "34 layers, 4 devices, 16 micro-batches" in printed
    assert "fused" in printed and "tokens/s" in printed and "bubble" in printed
    plan = eval(printed.splitlines()[-1], {"rp": SimpleNamespace(ExecutionPlan=ExecutionPlan)})
    plan.check_covers(34)


@pytest.mark.parametrize("extra", [[], ["--formula"], ["--asynchronous"]])
def test_plan_as_json(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert rpctl.main(["plan", *SMALL, "--tokens-per-microbatch", "100", "--json", *extra]) == 0
    found = json.loads(capsys.readouterr().out)
    ExecutionPlan([range(*s) for s in found["forward"]], [range(*s) for s in found["backward"]]).check_covers(7)
    assert found["tokens_per_s"] == pytest.approx(400 / found["iteration_ms"] * 1e3)
    assert 0 <= found["bubble"] < 1
    assert [stage["kind"] for stage in found["stages"]].count("fused") == 1


def test_a_slow_link_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", TIMES, "--model", "qwen3-1.7b", "--microbatches", "2", "--link-gb-per-s", "2"]
    assert rpctl.main(words) == 0
    assert "transfers take" in capsys.readouterr().err
    assert rpctl.main(["plan", TIMES, "--model", "qwen3-32b", "--devices", "4"]) == 0
    assert capsys.readouterr().err == ""


def test_simulate_compares_all_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    words = ["simulate", *SMALL, "--trace", str(trace), "--picture", str(picture), "--schedule", "1f1b"]
    assert rpctl.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["gpipe", "1f1b", "interleaved", "looped_bfs", "roundpipe"]
    xml.etree.ElementTree.parse(picture)
    assert "1f1b, 2 devices" in picture.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_simulate_as_json_says_what_is_not_possible(capsys: pytest.CaptureFixture[str]) -> None:
    assert rpctl.main(["simulate", *SMALL[:4], "--devices", "8", "--microbatches", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["schedules"]) == {"roundpipe"}
    assert found["refused"]["gpipe"] == "7 layers cannot be cut into 8 stages"


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan"], "give either a file of layer times or --forward-ms and --backward-ms"),
        (["plan", TIMES, "--forward-ms", "1"], "give either a file"),
        (["plan", "--forward-ms", "1"], "--forward-ms and --backward-ms go together"),
        (["plan", "no-such-file"], "cannot read no-such-file: No such file"),
        (["plan", TIMES], "several models: choose with --model qwen3-1.7b|llama-3.1-8b|qwen3-32b"),
        (["plan", TIMES, "--model", "gpt"], "has no model gpt, only qwen3-1.7b"),
        (["plan", "--forward-ms", "1,x", "--backward-ms", "1,1"], "'x' is neither a time such as 2.5 nor 2.5*28"),
        (["plan", "--forward-ms", "1,1", "--backward-ms", "1"], "forward_ms has 2 layers, backward_ms 1"),
        (["plan", "--forward-ms", "1", "--backward-ms=-1"], "backward_ms[0] is -1.0"),
        (["plan", *SMALL, "--devices", "0"], "num_devices must be a whole number from 1 on, not 0"),
        (["plan", *SMALL, "--link-gb-per-s", "0"], "--link-gb-per-s must be above 0"),
        (["plan", *SMALL, "--tokens-per-microbatch", "0"], "--tokens-per-microbatch must be at least 1"),
        (["plan", *SMALL, "--hop-ms", "-2"], "hop_ms"),
        (["plan", *SMALL, "--nonsense"], "unrecognized arguments: --nonsense"),
        (["simulate", *SMALL, "--microbatches", "0"], "num_microbatches must be a whole number from 1 on, not 0"),
        (["simulate", *SMALL, "--iterations", "0"], "iterations must be a whole number from 1 on"),
        (["simulate", *SMALL, "--schedule", "zigzag"], "invalid choice"),
        (["simulate", *SMALL, "--picture", "x.gif"], "the name must end in .svg or .png"),
        (["simulate", *SMALL, "--trace", "/no/such/folder/x"], "cannot write /no/such/folder/x: No such file"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rpctl.main(words) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        "{}",
        '{"models": {}}',
        '{"models": {"a": {}}}',
        '{"models": {"a": {"layers": [{"fwd_ms": 1}]}}}',
        '{"models": {"a": {"layers": [{"fwd_ms": "x", "bwd_ms": 1}]}}}',
        '{"models": {"a": {"layers": 3}}}',
        '{"models": {"a": {"layers": []}}}',
        '{"models": {"a": []}}',
        '{"models": {"a": {"layers": [{"fwd_ms": 1, "bwd_ms": 1}], "boundary_bytes": []}}}',
        '{"micro_batch": 7, "models": {"a": {"layers": [{"fwd_ms": 1, "bwd_ms": 1}]}}}',
    ],
)
def test_bad_files_get_one_line(body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.json"
    path.write_text(body)
    assert rpctl.main(["plan", str(path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("rpctl plan: ") and printed.count("\n") == 1


def test_a_png_needs_a_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.png"
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    assert rpctl.main(["simulate", *SMALL, "--picture", str(path)]) == 2
    assert "a PNG picture needs the library cairosvg (pip install cairosvg)" in capsys.readouterr().err
    assert not path.exists()
    drawn = SimpleNamespace(svg2png=lambda bytestring, scale: b"PNG " + bytestring[:4])
    monkeypatch.setitem(sys.modules, "cairosvg", drawn)
    assert rpctl.main(["simulate", *SMALL, "--picture", str(path)]) == 0
    assert path.read_bytes() == b"PNG <svg"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "simulate"):
        assert rpctl.main([command, "--help"]) == 0
        assert f"usage: rpctl {command}" in capsys.readouterr().out
