"""A causal LM in worker processes gives the numbers of an inline session.   pytest tests/test_models_processes.py"""

from __future__ import annotations

import pytest

from tests.test_processes import SCRIPTS, result_of, run_script

pytest.importorskip("transformers")


def test_two_workers_train_and_generate_as_inline():
    inline, workers = (
        result_of(run_script(SCRIPTS / "train_causal_lm.py", "--devices", devices, OMP_NUM_THREADS="1"))
        for devices in ("inline", "cpu:2")
    )
    assert workers["tokens"] == inline["tokens"]
    assert workers["losses"] == pytest.approx(inline["losses"], abs=1e-5)
    assert workers["weights"] == pytest.approx(inline["weights"], abs=1e-3)
