"""Fixtures of tests that train inline."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reference import PausedSession, inline, one_thread


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
