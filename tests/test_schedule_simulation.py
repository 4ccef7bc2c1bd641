"""The simulator: physics that hold for any sequence, the bubble formula, weights on a link, and no deadlock."""

from __future__ import annotations

import itertools
import json
import random
import xml.etree.ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpruntime.errors import ConfigError
from rpruntime.schedule import DeadlockError, DispatchSequence, ExecutionPlan, Slot, build, simulate, simulate_sequence
from rpruntime.schedule.bound import mirrored_plan
from rpruntime.schedule.costs import LayerTimes
from rpruntime.schedule.engine import Engine, Limits, Span
from rpruntime.schedule.picture import chrome_trace, svg
from rpruntime.schedule.simulation import account
from tests.examples import examples
from tests.test_schedule_sequence import UNEVEN, plans, sequences


def draw_times(data: st.DataObject, num_layers: int) -> LayerTimes:
    times = st.lists(st.integers(0, 9).map(float), min_size=num_layers, max_size=num_layers)
    forward = data.draw(times)
    extra = data.draw(times)
    return LayerTimes.of(forward, [f + e for f, e in zip(forward, extra, strict=True)])


@given(sequences(), st.data(), st.sampled_from([0.0, 0.5]), st.sampled_from([None, 1.0, 1e-5]))
def test_physics(sequence: DispatchSequence, data: st.DataObject, hop_ms: float, link: float | None) -> None:
    times = draw_times(data, sequence.num_layers)
    sizes = None if link is None else [100.0] * sequence.num_layers
    found = simulate_sequence(sequence, times, hop_ms=hop_ms, param_bytes=sizes, link_gb_per_s=link)

    # A device, and its link, does one thing at a time.
    for spans in (found.spans, found.uploads):
        for device in range(sequence.num_devices):
            mine = sorted((s for s in spans if s.device == device), key=lambda s: (s.start_ms, s.end_ms))
            assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in itertools.pairwise(mine))

    # Work is conserved: each slot's micro-batches run once, for their time.
    expected = sorted(
        (slot.device, slot.kind, slot.layers.start, mb, slot.iteration)
        for slot in sequence.slots
        for mb in slot.microbatches
    )
    assert sorted((s.device, s.kind, s.layers.start, s.microbatch, s.iteration) for s in found.spans) == expected
    work = sum(times.slot_ms(slot) * len(slot.microbatches) for slot in sequence.slots)
    assert found.busy_ms == pytest.approx(work)

    # Makespan is at least the share of work and the chain of one micro-batch, and bubbles add up.
    assert found.makespan_ms * sequence.num_devices >= work - 1e-6
    chain = sum(times.slot_ms(slot) for slot in sequence.slots if slot.iteration == 0 and 0 in slot.microbatches)
    waits = sequence.iterations if not sequence.asynchronous else 1
    assert found.makespan_ms >= chain * waits - 1e-6
    if found.makespan_ms > 0:
        assert found.bubble == pytest.approx(found.fill + found.switch + found.intra + found.drain, abs=1e-9)
    assert min(found.fill, found.switch, found.intra, found.drain) >= -1e-12

    # Inputs come first, a hop earlier if from another device.
    ended = {
        (s.iteration, s.microbatch, s.kind in ("backward", "fused"), layer): s
        for s in found.spans
        for layer in s.layers
    }
    for span in found.spans:
        before = None
        if span.kind == "backward" and span.layers.stop < sequence.num_layers:
            before = ended[span.iteration, span.microbatch, True, span.layers.stop]
        elif span.kind != "backward" and span.layers.start > 0:
            key = (span.iteration, span.microbatch, False, span.layers.start - 1)
            before = ended[key]
        if before is not None:
            hop = hop_ms if before.device != span.device else 0.0
            assert span.start_ms >= before.end_ms + hop - 1e-9


@given(plans(), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.data())
@examples(50)
def test_iterations_wait_as_they_must(
    plan: ExecutionPlan, devices: int, batches: int, asynchronous: bool, data: st.DataObject
) -> None:
    times = draw_times(data, plan.num_layers)
    sequence = build(
        "roundpipe", plan, num_devices=devices, num_microbatches=batches, iterations=4, asynchronous=asynchronous
    )
    found = simulate_sequence(sequence, times)
    lag = 2 if asynchronous else 1
    for iteration in range(lag, 4):
        start = min(span.start_ms for span in found.spans if span.iteration == iteration)
        assert start >= max(span.end_ms for span in found.spans if span.iteration == iteration - lag) - 1e-9


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2])
def test_the_bubble_formula_holds_for_equal_stages(devices: int, rounds: int) -> None:
    # L layers of 1 ms each way, one a stage: S = 2L - 1 equal stages. With one round of M > N micro-batches S has to
    # be a multiple of N, as for any schedule in which a device runs a stage's whole round.
    layers = 8 * 2
    stages = 2 * layers - 1
    batches = devices * rounds
    plan = ExecutionPlan.one_layer_a_stage(layers, round_size=devices)
    found = simulate(plan, [1.0] * layers, [1.0] * layers, num_devices=devices, num_microbatches=batches)
    fixed = devices * (devices - 1)
    assert found.bubble == pytest.approx(fixed / (batches * stages + fixed), abs=1e-12)
    assert found.intra == found.switch == pytest.approx(0, abs=1e-12)
    assert found.fill == pytest.approx(found.drain, abs=1e-12)


@pytest.mark.parametrize("batches", [8, 16, 40])
def test_the_bubble_formula_holds_for_one_round(batches: int) -> None:
    # 3 forward stages, the fused one and 4 backward ones, all of 1 ms: S = 8 on N = 4.
    plan = ExecutionPlan(
        [range(0, 2), range(2, 4), range(4, 6)], [range(6, 8), range(4, 6), range(3, 4), range(2, 3), range(0, 2)]
    )
    assert plan.num_stages == 8
    forward = [0.5] * 8
    backward = [0.5, 0.5, 1, 1, 0.5, 0.5, 0.5, 0.5]
    found = simulate(plan, forward, backward, num_devices=4, num_microbatches=batches)
    assert found.bubble == pytest.approx(12 / (batches * 8 + 12), abs=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_known_bubble_of_bound_schedules(schedule: str) -> None:
    plan = mirrored_plan([range(s, s + 1) for s in range(4)])
    # The last layer is not recomputed: its backward is the given one less its forward.
    found = simulate(plan, [1.0] * 4, [2.0] * 3 + [3.0], num_devices=4, num_microbatches=12, schedule=schedule)
    assert found.bubble == pytest.approx(3 / (12 + 3))


def test_asynchronous_iterations_flow_without_bubbles() -> None:
    plan = ExecutionPlan.one_layer_a_stage(8)
    times = [1.0] * 8
    spans = {}
    for iterations in (8, 16):
        spans[iterations] = simulate(
            plan, times, times, num_devices=4, num_microbatches=4, asynchronous=True, iterations=iterations
        )
    busy = spans[16].busy_ms - spans[8].busy_ms
    assert busy / 4 / (spans[16].makespan_ms - spans[8].makespan_ms) == pytest.approx(1)
    synchronous = simulate(plan, times, times, num_devices=4, num_microbatches=4, iterations=8)
    assert synchronous.makespan_ms == pytest.approx(8 * (4 * 15 + 12) / 4)


def test_weights_take_two_places_and_overlap_compute() -> None:
    plan = ExecutionPlan([range(0, 1), range(1, 2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(0, 1)])
    found = simulate(
        plan,
        [10.0] * 4,
        [10.0] * 4,
        num_devices=1,
        num_microbatches=2,
        param_bytes=[8e6] * 4,
        link_gb_per_s=1.0,
    )
    uploads = [(span.start_ms, span.end_ms) for span in found.uploads]
    # The second upload follows the first; the third waits for the end of the first stage (two places). Layer 2 is
    # still there from its forward when its backward comes after the fused stage.
    assert uploads[:3] == [(0, 8), (8, 16), (28, 36)]
    assert found.spans[0].start_ms == 8
    assert found.makespan_ms == 8 + 7 * 20
    assert [span.layers.start for span in found.uploads] == [0, 1, 2, 3, 1, 0]


def test_a_slow_link_sets_the_pace() -> None:
    plan = ExecutionPlan.one_layer_a_stage(4)
    slow = simulate(
        plan, [1.0] * 4, [1.0] * 4, num_devices=1, num_microbatches=1, param_bytes=[1e9] * 4, link_gb_per_s=1.0
    )
    assert slow.makespan_ms >= 6 * 1000


def test_categories_by_hand() -> None:
    spans = [
        Span(0, "forward", range(0, 1), 0, 0, 0.0, 2.0),
        Span(1, "forward", range(1, 2), 0, 0, 2.0, 3.0),
        Span(1, "backward", range(1, 2), 0, 0, 4.0, 5.0),
        Span(0, "backward", range(0, 1), 0, 0, 5.0, 7.0),
        Span(0, "backward", range(0, 1), 1, 0, 8.0, 10.0),
    ]
    found = account(spans, 2)
    assert (found.fill, found.switch, found.intra, found.drain) == (2 / 20, 4 / 20, 1 / 20, 5 / 20)
    assert found.bubble == pytest.approx(12 / 20)


# --- deadlocks


def test_a_deadlock_is_an_error_that_names_the_stuck_slots() -> None:
    # Room for one micro-batch between two stages: the stage that would take the third is behind the one producing it.
    sequence = build("roundpipe", UNEVEN, num_devices=1, num_microbatches=3)
    times = LayerTimes.of([1.0] * 3, [3.0] * 3)
    with pytest.raises(DeadlockError) as caught:
        simulate_sequence(sequence, times, limits=Limits(between=1))
    assert "'t0 forward 0-1 mb 0-2 dev 0', micro-batch 1, waits for 't0 fused 2-2 mb 0-2 dev 0'" in str(caught.value)


def test_a_wrong_order_is_a_deadlock_not_a_hang() -> None:
    sequence = build("roundpipe", UNEVEN, num_devices=2, num_microbatches=2)
    slots = list(sequence.slots)
    slots[0], slots[2] = slots[2], slots[0]
    wrong = DispatchSequence("roundpipe", 3, 2, 2, tuple(slots))
    with pytest.raises(DeadlockError, match="waits for the output of"):
        simulate_sequence(wrong, LayerTimes.of([1.0] * 3, [3.0] * 3))


def run_seed(seed: int) -> None:
    """A random plan and schedule with room for one of everything and random durations ends."""
    chance = random.Random(seed)
    devices, batches, layers = chance.randint(1, 8), chance.randint(1, 64), chance.randint(1, 12)
    fused = chance.randrange(layers)

    def cut(stop: int) -> list[range]:
        bounds = [0, *sorted(chance.sample(range(1, stop), chance.randint(0, stop - 1))), stop] if stop else [0]
        return [range(a, b) for a, b in itertools.pairwise(bounds)]

    round_size = chance.choice([None, chance.randint(1, batches)])
    plan = ExecutionPlan(cut(fused), [range(fused, layers), *reversed(cut(fused))], round_size)
    sequence = build(
        "roundpipe",
        plan,
        num_devices=devices,
        num_microbatches=batches,
        iterations=chance.randint(1, 2),
        asynchronous=chance.random() < 0.5,
        first_device=chance.randrange(devices),
    )

    def duration_ms(slot: Slot, microbatch: int) -> float:
        return chance.choice([0.0, 0.1, 1.0, 10.0]) * chance.random()

    engine = Engine(
        sequence,
        duration_ms,
        hop_ms=chance.choice([0.0, 0.3, 5.0]),
        upload_ms=lambda slot: chance.choice([0.0, 2.0]) * chance.random(),
        limits=Limits(queue=1, outputs=1, rounds=1),
    )
    engine.run()
    assert len(engine.spans) == sum(len(slot.microbatches) for slot in sequence.slots)


def test_capacity_one_always_ends() -> None:
    for seed in range(200):
        run_seed(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_capacity_one_always_ends_10_000_seeds() -> None:
    for seed in range(10_000):
        run_seed(seed)


# --- arguments, pictures


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hop_ms": -1.0}, "hop_ms"),
        ({"param_bytes": [1.0] * 3}, "param_bytes and link_gb_per_s go together"),
        ({"param_bytes": [1.0] * 3, "link_gb_per_s": 0.0}, "link_gb_per_s must be above 0"),
        ({"param_bytes": [1.0], "link_gb_per_s": 1.0}, "param_bytes has 1 values for 3 layers"),
        ({"schedule": "gpipe"}, "same stages forward and backward"),
        ({"iterations": 0}, "iterations must be a whole number"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"num_devices": 2, "num_microbatches": 2, **change}
    with pytest.raises(ConfigError, match=message):
        simulate(UNEVEN, [1.0] * 3, [3.0] * 3, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the plan has 3 layers, the model 2:"):
        simulate(UNEVEN, [1.0] * 2, [3.0] * 2, num_devices=2, num_microbatches=2)


def test_picture_and_trace() -> None:
    found = simulate(
        UNEVEN,
        [1.0] * 3,
        [3.0] * 3,
        num_devices=2,
        num_microbatches=2,
        param_bytes=[1e6] * 3,
        link_gb_per_s=1.0,
    )
    drawing = xml.etree.ElementTree.fromstring(svg(found, "a < b"))
    boxes = [element for element in drawing.iter() if element.tag.endswith("rect")]
    assert len(boxes) == 1 + 2 + len(found.spans) + 3  # page, devices, micro-batches, legend
    events = json.loads(json.dumps(chrome_trace(found)))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(found.spans) + len(found.uploads)
    assert sum(event.get("dur", 0) for event in events if event.get("tid") == 0) == pytest.approx(found.busy_ms * 1e3)
