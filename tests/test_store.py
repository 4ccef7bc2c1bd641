"""Allocator, arena, values and pinning."""

from __future__ import annotations

import dataclasses
import mmap
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpruntime.errors import HostMemoryError
from rpruntime.store.allocator import ALIGNMENT, Allocator, align
from rpruntime.store.arena import GRADIENTS, Arena, Store, view
from rpruntime.store.segments import PrivateSegments
from rpruntime.store.values import put_together, take_apart, why_not_picklable
from rpruntime.worker.pinning import MAX_CHUNK_BYTES, chunks, pin_segment
from tests.examples import examples


@examples(200)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3000), st.integers(0, 50)), max_size=60),
    st.sampled_from([64, 16, 24]),
)
def test_extents_never_overlap_nor_cross_a_span_and_freeing_all_leaves_whole_spans(actions, span):
    allocator = Allocator(span * ALIGNMENT)
    for segment in ("a", "b"):
        allocator.add_segment(segment, 64 * ALIGNMENT)
    live: list[tuple[str, int, int]] = []
    for allocate, nbytes, pick in actions:
        if allocate:
            place = allocator.allocate(nbytes)
            if place is None:
                continue
            segment, offset = place
            assert offset % ALIGNMENT == 0 and offset + align(nbytes) <= 64 * ALIGNMENT
            assert offset // (span * ALIGNMENT) == (offset + align(nbytes) - 1) // (span * ALIGNMENT)
            for other, start, size in live:
                assert other != segment or start + size <= offset or offset + align(nbytes) <= start
            live.append((segment, offset, align(nbytes)))
        elif live:
            segment, offset, _ = live.pop(pick % len(live))
            allocator.free(segment, offset)
        assert allocator.live_bytes == sum(size for _, _, size in live)
    for segment, offset, _ in live:
        allocator.free(segment, offset)
    whole = [allocator.allocate(span * ALIGNMENT) for _ in range(2 * (64 // span))]
    assert sorted(whole) == [(s, start * span * ALIGNMENT) for s in ("a", "b") for start in range(64 // span)]


def test_a_tensor_that_cannot_be_page_locked_at_once_is_refused_before_memory_is_asked_for():
    found = arena()
    with pytest.raises(HostMemoryError, match="cut the layer or the tensor"):
        found.allocate((64 << 30) + 1)
    assert found.total_bytes == 0


def test_freeing_twice_is_our_error():
    allocator = Allocator()
    allocator.add_segment("a", 1024)
    place = allocator.allocate(10)
    assert place is not None
    allocator.free(*place)
    with pytest.raises(AssertionError, match="double free"):
        allocator.free(*place)


def arena() -> Arena:
    source = PrivateSegments()
    return Arena("me.1", source, Store(source))


def test_an_arena_holds_at_most_two_percent_more_than_large_requests():
    found = arena()
    for nbytes in (int(2.25 * 2**20) * 64, *[int(1.2 * 2**20) * 64] * 5):
        before = found.total_bytes
        found.allocate(nbytes)
        assert found.total_bytes - before <= 1.02 * nbytes


def test_kinds_of_extents_lie_apart_so_that_long_ones_find_their_room_again():
    found = arena()
    found.reserve(48 << 20, GRADIENTS)
    for _ in range(3):
        activations = [found.allocate(4 << 20) for _ in range(4)]
        gradients = [found.allocate(24 << 20, GRADIENTS) for _ in range(2)]
        assert {e.segment for e in activations}.isdisjoint(e.segment for e in gradients)
        found.free_all([*activations, *gradients])
        found.clear()
    assert found.total_bytes == (48 + 16) << 20
    assert (found.bytes_for(GRADIENTS), found.bytes_for("")) == (48 << 20, 16 << 20)


class Limited(PrivateSegments):
    """A machine that has no more than so many bytes."""

    left = 0

    def create(self, nbytes: int):
        if nbytes > self.left:
            raise HostMemoryError("no room")
        self.left -= nbytes
        return super().create(nbytes)


def test_where_the_machine_has_no_more_a_kind_takes_the_room_of_another():
    source = Limited()
    source.left = 32 << 20
    found = Arena("me.1", source, Store(source))
    found.reserve(32 << 20, GRADIENTS)
    first = found.allocate(20 << 20)
    with pytest.raises(HostMemoryError, match="no room"):
        found.allocate(20 << 20, GRADIENTS)
    found.free(first)
    found.free(found.allocate(20 << 20, GRADIENTS))
    source.close()


def test_an_arena_reuses_what_was_freed():
    found = arena()
    first = found.allocate(1 << 20)
    total = found.total_bytes
    for _ in range(100):
        found.free(first)
        first = found.allocate(1 << 20)
    assert found.total_bytes == total


class WithDead(PrivateSegments):
    """Knows what a dead process had made."""

    dead: list[tuple[str, int]] = []

    def segments_of(self, owner: str) -> list[tuple[str, int]]:
        return self.dead if owner == "worker-0.1" else []


@pytest.mark.parametrize(
    "own, limit, adopted",
    [(0, 0, [8, 1, 2]), (3, 0, [8]), (4, 0, [1, 2]), (4, 12, [8]), (4, 15, [8, 1, 2]), (12, 0, [])],
)
def test_a_replacement_holds_no_more_than_it_may_or_its_predecessor_did(own, limit, adopted):
    """In MiB; the predecessor had 11."""
    source = WithDead()
    store = Store(source)
    source.dead = [(source.create(mib << 20)[0], mib << 20) for mib in (8, 1, 2)]
    arena = Arena("worker-0.2", source, store)
    if own:
        arena.reserve(own << 20)
    given_up = arena.adopt("worker-0.1", limit << 20)
    assert [nbytes >> 20 for name, nbytes in source.dead if name not in given_up] == adopted
    assert arena.total_bytes == (own + sum(adopted)) << 20
    for mib in adopted:
        assert arena.allocate(mib << 20).nbytes == mib << 20
    source.close()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_tensor_survives_the_arena(shape, dtype):
    found = arena()
    tensor = torch.randn(shape).to(dtype) if dtype != torch.bool else torch.randn(shape) > 0
    handle = found.allocate_tensor(tuple(shape), dtype)
    found.store.tensor(handle).copy_(tensor)
    read = found.store.tensor(handle)
    assert read.dtype == dtype and read.shape == tensor.shape and torch.equal(read, tensor)


def test_strides_are_kept():
    memory = torch.arange(24, dtype=torch.uint8)
    assert torch.equal(view(memory, 0, (4, 6), "uint8", (1, 4)), memory.view(6, 4).t())


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: object


def test_values_keep_their_structure_and_identity():
    x, y = torch.ones(2), torch.zeros(3, dtype=torch.bool)
    value = {"a": (x, None, 3), "b": [Output(y, x), "text"], "c": x}
    skeleton, tensors = take_apart(value)
    assert [id(t) for t in tensors] == [id(x), id(y)]
    back = put_together(skeleton, tensors)
    assert back["a"][0] is back["c"] is back["b"][0].extra is x
    assert back["b"][0].hidden is y and back["a"][1:] == (None, 3) and back["b"][1] == "text"


def test_what_cannot_be_pickled_is_named():
    class Holder:
        def __init__(self):
            self.fine = 1
            self.inner = {"lock": threading.Lock()}

    assert why_not_picklable(Holder(), "model[3]").startswith("model[3].inner['lock'] (lock):")
    lock = threading.Lock()
    assert "variable lock" in why_not_picklable(lambda: lock, "loss_fn")


@given(st.integers(1, 5 * MAX_CHUNK_BYTES // 4096))
def test_pinning_covers_a_mapping_once_in_bounded_aligned_calls(pages):
    nbytes = pages * 4096 - 17
    end = 1 << 40
    for address, size in chunks(1 << 40, nbytes):
        assert address == end and address % 4096 == 0 and 0 < size <= MAX_CHUNK_BYTES
        end = address + size
    assert end - (1 << 40) == pages * 4096


def test_512_gib_are_pinned_in_pieces_that_a_driver_takes():
    refused = [size for _, size in chunks(0, 512 << 30) if size >= 512 << 30]
    assert not refused and len(chunks(0, 512 << 30)) == 8


def test_a_refused_pin_says_size_limit_and_advice():
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    with pytest.raises(HostMemoryError, match=r"GiB of segment worker-0.1-1 \(error 2\): .*(ulimit -l|another limit)"):
        pin_segment("worker-0.1-1", memory, call=lambda address, nbytes: 2)


def test_no_torch_pinned_buffer_is_made_anywhere():
    import pathlib

    import rpruntime

    for path in pathlib.Path(rpruntime.__file__).parent.rglob("*.py"):
        assert "pin_memory" not in path.read_text(), path
