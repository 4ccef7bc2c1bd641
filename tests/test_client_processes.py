"""Tasks of one's own in real processes: the numbers are those of one process, also when workers die."""

from __future__ import annotations

import pytest

from tests.test_deaths import death, deaths_told, dying
from tests.test_processes import SCRIPTS, inline_result, result_of, run_script

SCRIPT = SCRIPTS / "train_tasks.py"


@pytest.fixture(scope="module")
def inline_numbers() -> dict:
    found = inline_result(SCRIPT)
    assert len(set(found["losses"])) == 3
    return found


@pytest.mark.slow  # without deaths it is the same and less
def test_two_workers_give_the_numbers_of_inline(inline_numbers):
    assert result_of(run_script(SCRIPT, "--devices", "cpu:2")) == inline_numbers


def test_workers_that_die_change_no_number(inline_numbers):
    rules = [
        death("worker-0", "forward", 3),
        death("worker-1", "backward", 2, how="segv"),
        death("worker-0", "handed", 2, incarnation=2, how="exit"),
    ]
    run = run_script(
        SCRIPT,
        *("--devices", "cpu:2", "--max-restarts", "100", "--max-task-failures", "100"),
        **dying(*rules),
    )
    assert result_of(run) == inline_numbers
    assert deaths_told(run) == 3, run.stderr
