"""A causal LM in worker processes gives the numbers of an inline session.   pytest tests/test_models_processes.py"""

from __future__ import annotations

from tests.test_processes import SCRIPTS, inline_result, result_of, run_script


def test_two_workers_train_and_generate_as_inline():
    script = SCRIPTS / "train_causal_lm.py"
    assert result_of(run_script(script, "--devices", "cpu:2", OMP_NUM_THREADS="1")) == inline_result(script)
