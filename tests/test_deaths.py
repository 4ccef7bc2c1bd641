"""Workers of a real run die at chosen moments: the numbers are those of an undisturbed one, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.test_processes import ROOT, SCRIPTS, result_of, run_script

STEPS = "8"
MOMENTS = (
    "load",
    "built",
    "stage",
    "run",
    "forward",
    "recompute",
    "loss",
    "backward",
    "launched",
    "finish",
    "handed",
    "commit",
    "committed",
)


def death(role: str, moment: str, count: int = 1, incarnation: int = 1, how: str = "kill") -> dict:
    return {"role": role, "moment": moment, "count": count, "incarnation": incarnation, "how": how}


def run_dying(*rules: dict, devices: str = "cpu:2", flags: tuple[str, ...] = (), **more: str):
    flags = ("--devices", devices, "--max-restarts", "100", "--max-task-failures", "100", *flags)
    return run_script(
        SCRIPTS / "train_small.py",
        *flags,
        SCRIPT_STEPS=STEPS,
        DYING=json.dumps(rules),
        RPRUNTIME_CHILD_COMMAND=f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'dying_worker.py'}",
        **more,
    )


def deaths_told(run: subprocess.CompletedProcess[str]) -> int:
    return sum("died" in line and "worker-" in line for line in run.stderr.splitlines())


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict]:
    found = {}
    for mode, more in (("sync", {}), ("async", {"SCRIPT_ASYNC": "1"})):
        run = run_script(SCRIPTS / "train_small.py", "--devices", "inline", SCRIPT_STEPS=STEPS, **more)
        found[mode] = result_of(run)
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_deaths_in_forward_backward_and_hand_over_change_no_number(undisturbed, mode):
    more = {"SCRIPT_ASYNC": "1"} if mode == "async" else {}
    run = run_dying(
        death("worker-0", "forward", 3),
        death("worker-1", "backward", 2, how="segv"),
        death("worker-0", "handed", 1, incarnation=2, how="exit"),
        **more,
    )
    assert result_of(run) == undisturbed[mode]
    assert deaths_told(run) == 3, run.stderr


def test_the_only_worker_dies_twice_and_the_run_waits_for_its_replacement(undisturbed):
    run = run_dying(
        death("worker-0", "commit", 2), death("worker-0", "loss", 5, incarnation=2, how="segv"), devices="cpu:1"
    )
    assert result_of(run) == undisturbed["sync"]
    assert deaths_told(run) == 2, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_at_any_moment_changes_no_number(undisturbed, moment, mode):
    more = {"SCRIPT_ASYNC": "1"} if mode == "async" else {}
    count = 1 if moment in ("load", "built") else 4
    run = run_dying(death("worker-1", moment, count), **more)
    assert result_of(run) == undisturbed[mode]
    assert deaths_told(run) == 1, run.stderr
