"""The command line: ours up to the script's name, the rest untouched; one table for all."""

from __future__ import annotations

import os

import pytest

from rpruntime import flags
from rpruntime.errors import ConfigError

REST = ["--r=16", "--help", "-n", "2", "--num-gpus", "3", "--", "x", "--devices", "cpu:9", "-m", "-q"]


@pytest.mark.parametrize(
    "ours, given",
    [
        ([], {}),
        (["--devices", "cpu:4"], {"devices": "cpu:4"}),
        (["--devices=cpu:4", "-q"], {"devices": "cpu:4", "quiet": True}),
        (["--max_restarts", "5"], {"max_restarts": 5}),
        (["--max-restarts=5", "--shutdown_timeout=2.5"], {"max_restarts": 5, "shutdown_timeout": 2.5}),
        (["-t", "workers"], {"tee": "workers"}),
        (["-tall"], {"tee": "all"}),
        (["--tee=none", "--debug"], {"tee": "none", "debug": True}),
        (["--debug=0"], {"debug": False}),
    ],
)
@pytest.mark.parametrize("target", ["train.py", "-m"])
def test_the_rest_is_the_scripts(ours: list[str], given: dict[str, object], target: str) -> None:
    words = ["-m", "pkg.mod"] if target == "-m" else [target]
    line = flags.parse([*ours, *words, *REST])
    assert line.given == given
    assert line.arguments == REST
    assert line.target == words[-1]
    assert line.module == (target == "-m")
    assert not line.help


def test_module_joined_and_double_dash() -> None:
    line = flags.parse(["-mpkg.mod", "a"])
    assert (line.module, line.target, line.arguments) == (True, "pkg.mod", ["a"])
    line = flags.parse(["-q", "--", "-odd.py", "--x"])
    assert (line.target, line.arguments) == ("-odd.py", ["--x"])


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--dev", "cpu:1", "x.py"], "unknown flag --dev"),
        (["--r=16", "x.py"], "unknown flag --r"),
        (["--device=cpu:1", "x.py"], "did you mean --devices"),
        (["--max-restarts", "many", "x.py"], "a whole number is needed"),
        (["--max-restarts=-1", "x.py"], "a whole number is needed"),
        (["--optimizer-threads", "0", "x.py"], "a whole number from 1 on is needed"),
        (["--max-task-failures", "0", "x.py"], "a whole number from 1 on is needed"),
        (["--hang-timeout", "-1", "x.py"], "a number is needed"),
        (["--shutdown-timeout", "nan", "x.py"], "a number is needed"),
        (["--tee", "some", "x.py"], "one of none, workers, all"),
        (["-m"], "needs the name of a module"),
        (["--devices"], "needs a value"),
        (["-x", "x.py"], "unknown flag -x"),
        (["-qt", "x.py"], "unknown flag"),
    ],
)
def test_wrong_lines(words: list[str], sentence: str) -> None:
    with pytest.raises(flags.UsageError, match=sentence):
        flags.parse(words)


def test_variables_come_after_the_line_and_before_defaults() -> None:
    environ = {
        "RPRUNTIME_DEVICES": "cpu:2",
        "RPRUNTIME_QUIET": "1",
        "RPRUNTIME_MAX_RESTARTS": "7",
        "RPRUNTIME_TEE": "",
    }
    values = flags.settings({"devices": "cpu:3"}, environ)
    assert values["devices"] == "cpu:3"
    assert values["quiet"] is True
    assert values["max_restarts"] == 7
    assert values["tee"] == "none"
    assert values["shutdown_timeout"] == 10.0
    assert values["max_task_failures"] == 2
    assert values["hang_timeout"] == 300.0
    with pytest.raises(flags.UsageError, match="RPRUNTIME_DEBUG"):
        flags.settings({}, {"RPRUNTIME_DEBUG": "maybe"})


def test_python_arguments() -> None:
    assert flags.from_python({"devices": None, "max_restarts": 2, "quiet": True}) == {
        "max_restarts": 2,
        "quiet": True,
    }
    with pytest.raises(ConfigError, match="did you mean 'max_restarts'"):
        flags.from_python({"max_restart": 2})
    with pytest.raises(ConfigError, match=r"rp\.init\(max_restarts="):
        flags.from_python({"max_restarts": "x"})


def test_round_trip() -> None:
    given = {"devices": "cpu:3", "quiet": True, "shutdown_timeout": 2.5, "name": "a b"}
    assert flags.parse([*flags.to_command_line(given), "x.py"]).given == given


def test_help_is_one_screen() -> None:
    lines = flags.help_text().splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    assert text.index("rplaunch train.py") < text.index("devices:") < text.index("exit code")
    for flag in flags.FLAGS:
        assert f"--{flag.name}" in text
        assert flag.variable in text


def test_paths_are_absolute(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = flags.parse(["--trace", "x.json", "train.py"])
    assert flags.settings(line.given)["trace"] == str(tmp_path / "x.json")
    assert flags.from_python({"trace": "~/x.json"}) == {"trace": os.path.expanduser("~/x.json")}
