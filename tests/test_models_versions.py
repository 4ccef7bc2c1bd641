"""The families with the newest transformers 4.   pytest tests/test_models_versions.py

It lies in the folder that RPRUNTIME_TEST_TRANSFORMERS4 names, else in .venv/transformers4 (scripts/setup_env.sh).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("RPRUNTIME_TEST_TRANSFORMERS4") or ROOT / ".venv" / "transformers4")


@pytest.mark.skipif(not (FOLDER / "transformers").is_dir(), reason=f"no transformers 4 in {FOLDER}")
@pytest.mark.parametrize(
    "selection",
    ["llama-tied", pytest.param("", marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["some", "all"],
)
def test_the_families_give_the_numbers_of_transformers_4(selection):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    code = (
        "import sys, pytest, transformers; assert transformers.__version__.startswith('4.'), transformers.__file__; "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/test_models_families.py', '-k', sys.argv[1]]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, selection], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
