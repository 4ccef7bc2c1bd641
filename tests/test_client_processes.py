"""Tasks of one's own in real processes: the numbers are those of one process, also when workers die."""

from __future__ import annotations

import json
import sys

import pytest

from tests.test_deaths import death
from tests.test_processes import ROOT, SCRIPTS, result_of, run_script

SCRIPT = SCRIPTS / "train_tasks.py"


@pytest.fixture(scope="module")
def inline_result() -> dict:
    found = result_of(run_script(SCRIPT, "--devices", "inline"))
    assert len(set(found["losses"])) == 3
    return found


def test_two_workers_give_the_numbers_of_inline(inline_result):
    assert result_of(run_script(SCRIPT, "--devices", "cpu:2")) == inline_result


def test_workers_that_die_change_no_number(inline_result):
    rules = [
        death("worker-0", "forward", 3),
        death("worker-1", "backward", 2, how="segv"),
        death("worker-0", "handed", 2, incarnation=2, how="exit"),
    ]
    run = run_script(
        SCRIPT,
        *("--devices", "cpu:2", "--max-restarts", "100", "--max-task-failures", "100"),
        DYING=json.dumps(rules),
        RPRUNTIME_CHILD_COMMAND=f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'dying_worker.py'}",
    )
    assert result_of(run) == inline_result
    assert sum("died" in line and "worker-" in line for line in run.stderr.splitlines()) == 3, run.stderr
