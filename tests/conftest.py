"""Fixtures of tests that train inline, their threads, and how much hypothesis tries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.examples import FULL, QUICK
from tests.reference import PausedSession, inline, one_thread

# Tensors in tests are tiny: a second thread gains nothing, and beside other work each waits for the other's time slice.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: decorators ask for the profile."""
    if not config.getoption("hypothesis_profile", None):
        settings.load_profile(QUICK if config.getoption("markexpr") == "not slow" else FULL)


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """One intra-op thread, as bit-for-bit equality asks for."""
    with one_thread():
        yield


@pytest.fixture
def session() -> Iterator[PausedSession]:
    """An inline session of two workers."""
    with inline(workers=2) as session:
        yield session
