"""Dispatch sequences: golden ones of each schedule, text form, and what the validator refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpruntime.errors import ConfigError
from rpruntime.schedule import DispatchSequence, ExecutionPlan, Slot, build, check_sequence
from rpruntime.schedule.bound import mirrored_plan

TWO = mirrored_plan([range(0, 2), range(2, 3)])
FOUR = mirrored_plan([range(0, 1), range(1, 2), range(2, 3), range(3, 4)])
UNEVEN = ExecutionPlan([range(0, 2)], [range(2, 3), range(1, 2), range(0, 1)])

GOLDEN = {
    "gpipe": (
        TWO,
        """gpipe sync layers 3 devices 2 microbatches 2 iterations 1
t0 forward 0-1 mb 0-1 dev 0
t0 forward 2-2 mb 0-1 dev 1
t0 backward 2-2 mb 0-1 dev 1
t0 backward 0-1 mb 0-1 dev 0""",
    ),
    "1f1b": (
        TWO,
        """1f1b sync layers 3 devices 2 microbatches 2 iterations 1
t0 forward 0-1 mb 0-0 dev 0
t0 forward 0-1 mb 1-1 dev 0
t0 forward 2-2 mb 0-0 dev 1
t0 backward 2-2 mb 0-0 dev 1
t0 forward 2-2 mb 1-1 dev 1
t0 backward 2-2 mb 1-1 dev 1
t0 backward 0-1 mb 0-0 dev 0
t0 backward 0-1 mb 1-1 dev 0""",
    ),
    "interleaved": (
        FOUR,
        """interleaved sync layers 4 devices 2 microbatches 2 iterations 1
t0 forward 0-0 mb 0-0 dev 0
t0 forward 0-0 mb 1-1 dev 0
t0 forward 1-1 mb 0-0 dev 1
t0 forward 1-1 mb 1-1 dev 1
t0 forward 2-2 mb 0-0 dev 0
t0 forward 2-2 mb 1-1 dev 0
t0 forward 3-3 mb 0-0 dev 1
t0 backward 3-3 mb 0-0 dev 1
t0 forward 3-3 mb 1-1 dev 1
t0 backward 3-3 mb 1-1 dev 1
t0 backward 2-2 mb 0-0 dev 0
t0 backward 2-2 mb 1-1 dev 0
t0 backward 1-1 mb 0-0 dev 1
t0 backward 1-1 mb 1-1 dev 1
t0 backward 0-0 mb 0-0 dev 0
t0 backward 0-0 mb 1-1 dev 0""",
    ),
    "looped_bfs": (
        FOUR,
        """looped_bfs sync layers 4 devices 2 microbatches 2 iterations 1
t0 forward 0-0 mb 0-1 dev 0
t0 forward 1-1 mb 0-1 dev 1
t0 forward 2-2 mb 0-1 dev 0
t0 forward 3-3 mb 0-1 dev 1
t0 backward 3-3 mb 0-1 dev 1
t0 backward 2-2 mb 0-1 dev 0
t0 backward 1-1 mb 0-1 dev 1
t0 backward 0-0 mb 0-1 dev 0""",
    ),
    "roundpipe": (
        UNEVEN,
        """roundpipe sync layers 3 devices 2 microbatches 2 iterations 1
t0 forward 0-1 mb 0-1 dev 0
t0 fused 2-2 mb 0-1 dev 1
t0 backward 1-1 mb 0-1 dev 0
t0 backward 0-0 mb 0-1 dev 1""",
    ),
}


@pytest.mark.parametrize("schedule", GOLDEN)
def test_golden(schedule: str) -> None:
    plan, text = GOLDEN[schedule]
    sequence = build(schedule, plan, num_devices=2, num_microbatches=2)
    lines, expected = str(sequence).splitlines(), text.splitlines()
    assert sorted(lines) == sorted(expected)
    for device in ("dev 0", "dev 1"):
        assert [x for x in lines if x.endswith(device)] == [x for x in expected if x.endswith(device)]
    check_sequence(sequence)


def test_one_forward_one_backward_alternate() -> None:
    plan = mirrored_plan([range(s, s + 1) for s in range(4)])
    sequence = build("1f1b", plan, num_devices=4, num_microbatches=6)
    words = ["".join(f"{slot.kind[0]}{slot.microbatches.start}" for slot in sequence.of_device(d)) for d in range(4)]
    assert words == [
        "f0f1f2f3b0f4b1f5b2b3b4b5",
        "f0f1f2b0f3b1f4b2f5b3b4b5",
        "f0f1b0f2b1f3b2f4b3f5b4b5",
        "f0b0f1b1f2b2f3b3f4b4f5b5",
    ]


def test_rounds_and_iterations_resume_where_the_last_ended() -> None:
    plan = ExecutionPlan(UNEVEN.forward, UNEVEN.backward, round_size=2)
    sequence = build(
        "roundpipe", plan, num_devices=3, num_microbatches=3, iterations=2, asynchronous=True, first_device=2
    )
    assert [slot.device for slot in sequence.slots] == [(2 + i) % 3 for i in range(16)]
    assert [slot.microbatches for slot in sequence.slots[::4]] == [range(0, 2), range(2, 3)] * 2
    assert [slot.iteration for slot in sequence.slots] == [0] * 8 + [1] * 8
    check_sequence(sequence)


@st.composite
def plans(draw: st.DrawFn, max_layers: int = 9) -> ExecutionPlan:
    count = draw(st.integers(1, max_layers))
    fused = draw(st.integers(0, count - 1))

    def cut(stop: int) -> list[range]:
        inner = sorted(draw(st.sets(st.integers(1, stop - 1)))) if stop > 1 else []
        bounds = [0, *inner, stop] if stop else [0]
        return [range(a, b) for a, b in itertools.pairwise(bounds)]

    round_size = draw(st.none() | st.integers(1, 9))
    return ExecutionPlan(cut(fused), [range(fused, count), *reversed(cut(fused))], round_size)


@st.composite
def sequences(draw: st.DrawFn, max_layers: int = 9, max_devices: int = 4) -> DispatchSequence:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "looped_bfs", "roundpipe"]))
    devices = draw(st.integers(1, max_devices))
    iterations, asynchronous = draw(st.integers(1, 3)), draw(st.booleans())
    if schedule == "roundpipe":
        plan, microbatches = draw(plans(max_layers)), draw(st.integers(1, 9))
    else:
        each = draw(st.integers(1, 3)) if schedule in ("interleaved", "looped_bfs") else 1
        sizes = draw(st.lists(st.integers(1, 2), min_size=each * devices, max_size=each * devices))
        stages = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        plan = mirrored_plan(stages)
        microbatches = draw(st.integers(1, 3)) * (devices if schedule == "interleaved" else 1)
    return build(
        schedule,
        plan,
        num_devices=devices,
        num_microbatches=microbatches,
        iterations=iterations,
        asynchronous=asynchronous,
        first_device=draw(st.integers(0, devices - 1)) if schedule == "roundpipe" else 0,
    )


@given(sequences())
def test_every_generated_sequence_is_valid_and_parses_back(sequence: DispatchSequence) -> None:
    check_sequence(sequence)
    assert DispatchSequence.parse(str(sequence)) == sequence
    for slot in sequence.slots:
        assert Slot.parse(str(slot)) == slot


@given(sequences(), st.data())
def test_the_validator_notices_any_slot_lost_doubled_or_moved_before_its_input(
    sequence: DispatchSequence, data: st.DataObject
) -> None:
    slots = list(sequence.slots)
    at = data.draw(st.integers(0, len(slots) - 1))
    what = data.draw(st.sampled_from(["lost", "doubled", "moved"]))
    if what == "lost":
        del slots[at]
    elif what == "doubled":
        slots.insert(at, slots[at])
    else:
        after = [
            later
            for later in range(at + 1, len(slots))
            if slots[later].iteration == slots[at].iteration
            and set(slots[later].microbatches) & set(slots[at].microbatches)
        ]
        if not after:
            return
        slots.insert(at, slots.pop(after[0]))
    with pytest.raises(ConfigError):
        check_sequence(replace(sequence, slots=tuple(slots)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device": 2}, "there are 2 devices"),
        ({"layers": range(0, 9)}, "there are 3 layers"),
        ({"layers": range(1, 1)}, "there are 3 layers"),
        ({"microbatches": range(0, 5)}, "there are 2 micro-batches"),
        ({"iteration": 1}, "iterations ascend and there are 1"),
        ({"kind": "infer"}, "no part of training"),
    ],
)
def test_slots_that_cannot_be(change: dict[str, object], message: str) -> None:
    sequence = build("roundpipe", UNEVEN, num_devices=2, num_microbatches=2)
    slots = (replace(sequence.slots[0], **change), *sequence.slots[1:])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        check_sequence(replace(sequence, slots=slots))


def test_memory_is_checked_per_direction() -> None:
    sequence = build("roundpipe", UNEVEN, num_devices=2, num_microbatches=2)
    sizes = {"forward_bytes": [10.0, 10, 10], "backward_bytes": [25.0, 25, 25]}
    check_sequence(sequence, **sizes, memory_limit=25)
    with pytest.raises(ConfigError, match="'t0 fused 2-2 mb 0-1 dev 1' needs 25 bytes, the limit is 24"):
        check_sequence(sequence, **sizes, memory_limit=24)
    with pytest.raises(ConfigError, match="'t0 forward 0-1 mb 0-1 dev 0' needs 20 bytes"):
        check_sequence(sequence, **sizes, memory_limit=19)


@pytest.mark.parametrize(
    "text", ["", "t0 forward 0-1 mb 0-1", "t0 sideways 0-1 mb 0-1 dev 0", "t0 forward 3-1 mb 0-1 dev 0"]
)
def test_what_is_no_slot(text: str) -> None:
    with pytest.raises(ConfigError, match="not a slot"):
        Slot.parse(text)
    with pytest.raises(ConfigError, match="a sequence begins with"):
        DispatchSequence.parse(text)


@pytest.mark.parametrize(
    "schedule, plan, devices, microbatches, message",
    [
        ("gpipe", UNEVEN, 2, 2, "same stages forward and backward"),
        ("1f1b", TWO, 3, 2, "one stage a device, 3, not 2"),
        ("looped_bfs", TWO, 4, 2, "multiple of 4 stages, not 2"),
        ("interleaved", FOUR, 2, 3, "multiple of 2 micro-batches"),
        ("zigzag", TWO, 2, 2, "no schedule 'zigzag'"),
        ("roundpipe", TWO, 0, 2, "num_devices"),
        ("roundpipe", TWO, 2, 0, "num_microbatches"),
    ],
)
def test_what_cannot_be_built(
    schedule: str, plan: ExecutionPlan, devices: int, microbatches: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(schedule, plan, num_devices=devices, num_microbatches=microbatches)
