"""A causal LM in worker processes gives the numbers of an inline session.   pytest tests/test_models_processes.py"""

from __future__ import annotations

from tests.test_processes import SCRIPTS, result_of, run_script


def test_two_workers_train_and_generate_as_inline():
    inline, workers = (
        result_of(run_script(SCRIPTS / "train_causal_lm.py", "--devices", devices, OMP_NUM_THREADS="1"))
        for devices in ("inline", "cpu:2")
    )
    assert workers == inline
