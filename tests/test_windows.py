"""Copies in pieces: cutting, longest processing time first, and who starts what when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpruntime.worker.transfers import CpuTransfers, DelayedTransfers
from rpruntime.worker.windows import PIECE_BYTES, Windows, WindowSizes, cut, longest_first


@given(st.integers(0, 2000), st.integers(1, 300))
def test_pieces_cover_every_byte_once_and_are_no_larger_than_allowed(nbytes: int, limit: int) -> None:
    pieces = cut(nbytes, limit)
    assert [first for first, _ in pieces[1:]] == [stop for _, stop in pieces[:-1]]
    assert sum(stop - first for first, stop in pieces) == nbytes
    assert all(0 < stop - first <= limit for first, stop in pieces)


@given(st.lists(st.integers(0, 100)), st.integers(1, 20))
def test_longest_first_spreads_all_and_its_longest_window_is_within_the_known_bound(
    sizes: list[int], num_windows: int
) -> None:
    windows = longest_first(sizes, num_windows)
    assert sorted(index for window in windows for index in window) == list(range(len(sizes)))
    # Graham: at most 4/3 of the best, which is no shorter than the mean and the largest item
    longest = max(sum(sizes[index] for index in window) for window in windows)
    ranked = sorted(sizes, reverse=True)
    two_together = sum(ranked[num_windows - 1 : num_windows + 1]) if len(sizes) > num_windows else 0
    best = max(sum(sizes) / num_windows, max(sizes, default=0), two_together)
    assert longest <= 4 / 3 * best + 1e-9


def test_equal_pieces_are_spread_evenly_and_in_order() -> None:
    assert longest_first([5] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


def test_windows_copy_their_part_when_they_open_and_the_rest_at_the_end() -> None:
    transfers = CpuTransfers(lambda: 0.0)
    host = torch.arange(100, dtype=torch.uint8)
    copy = transfers.upload_pieces(host)
    copy._result.zero_()  # type: ignore[attr-defined]
    windows = Windows([copy], 5, WindowSizes(piece_bytes=10, window_bytes=1))
    assert copy._result.count_nonzero() == 19  # type: ignore[attr-defined] # two of ten pieces, one of them with a zero
    windows.open()
    assert copy._result.count_nonzero() == 39  # type: ignore[attr-defined]
    assert not copy.done()
    windows.finish()
    assert copy.done()
    assert torch.equal(copy.wait(), host)
    windows.open()  # nothing is left: no byte is copied twice


@pytest.mark.parametrize("num_windows", [0, 1, 8])
def test_what_fits_one_window_starts_at_once(num_windows: int) -> None:
    transfers = CpuTransfers(lambda: 0.0)
    copies = [transfers.upload_pieces(torch.ones(n, dtype=torch.uint8)) for n in (0, 3, PIECE_BYTES + 1)]
    Windows(copies, num_windows)
    assert all(copy.done() for copy in copies)


def test_late_copies_are_done_only_when_all_their_pieces_have_started() -> None:
    transfers = DelayedTransfers(lambda: 0.0)
    host = torch.zeros(20, dtype=torch.uint8)
    copy = transfers.download_pieces(torch.ones(20, dtype=torch.uint8), host)
    assert host.eq(255).all()  # poisoned
    copy.start(0, 10)
    assert not any(copy.done() for _ in range(10))
    copy.start(10, 20)
    assert any(copy.done() for _ in range(10))
    assert host.eq(1).all()
