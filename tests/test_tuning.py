"""plan="auto" on paper: when the plan changes, and when it does not."""

from __future__ import annotations

import re

import pytest

from rpruntime import tuning
from rpruntime.schedule import ExecutionPlan
from rpruntime.tuning import MEASURED_ITERATIONS, REPLAN_INTERVAL, Span, Tuner

FIRST_LOOK = 1 + MEASURED_ITERATIONS
MICROBATCHES = 8


def spans(layers: range, ms: float = 1.0, *, backward: float = 2.0) -> list[Span]:
    """What workers say of one micro-batch through each of these layers as a stage of its own."""
    found: list[Span] = []
    for layer in layers:
        found.append(("forward", layer, layer + 1, 0, 0.0, ms))
        found.append(("backward", layer, layer + 1, 0, 5.0, 5.0 + backward * ms))
    return found


def run(tuner: Tuner, iterations: range, ms: list[float], *, asynchronous: bool = False, peak: int = 0) -> list[str]:
    """News of iterations that take so long."""
    news = []
    for iteration in iterations:
        tuner.before_iteration(iteration, MICROBATCHES, asynchronous=asynchronous)
        if tuner.news:
            news.append(f"{iteration}: {tuner.news}")
            tuner.news = ""
        for layer, value in enumerate(ms):
            tuner.observe(spans(range(layer, layer + 1), value), peak)
    return news


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_layer_a_stage_for_the_measured_iterations_then_the_computed_plan(asynchronous: bool) -> None:
    tuner = Tuner(12, 2)
    ms = [1.0] * 11 + [9.0]
    assert run(tuner, range(FIRST_LOOK), ms, asynchronous=asynchronous) == []
    assert tuner.plan == ExecutionPlan.one_layer_a_stage(12)
    news = run(tuner, range(FIRST_LOOK, FIRST_LOOK + 1), ms, asynchronous=asynchronous)
    assert tuner.plan != ExecutionPlan.one_layer_a_stage(12)
    assert len(news) == 1
    found = re.fullmatch(
        r"\d+: layers measured: now (\d+) stages \((\d+) forward, (\d+) backward\), "
        r"([\d.]+) ms an iteration expected \(was ([\d.]+)\)",
        news[0],
    )
    assert found is not None, news
    assert int(found[1]) == tuner.plan.num_stages == int(found[2]) + int(found[3])
    assert (int(found[2]), int(found[3])) == (len(tuner.plan.forward), len(tuner.plan.backward))
    assert float(found[4]) < float(found[5])


def test_no_plan_before_every_layer_was_timed() -> None:
    tuner = Tuner(4, 2)
    for iteration in range(3 * FIRST_LOOK):
        tuner.before_iteration(iteration, MICROBATCHES, asynchronous=False)
        tuner.observe(spans(range(3), 1.0), 0)
    assert tuner.plan == ExecutionPlan.one_layer_a_stage(4)


def test_averages_go_on() -> None:
    tuner = Tuner(2, 1)
    for ms in (1.0, 2.0, 3.0):
        tuner.observe(spans(range(2), ms), 0)
    assert tuner.forward_ms == pytest.approx([2.0, 2.0])
    assert tuner.backward_ms == pytest.approx([6.0, 6.0])  # with the recomputation
    for _ in range(100):
        tuner.observe(spans(range(2), 10.0), 0)
    assert tuner.forward_ms == pytest.approx([10.0, 10.0])


def test_a_stage_of_several_layers_is_divided_as_they_were_alone_and_the_loss_is_the_last_layers() -> None:
    tuner = Tuner(2, 1)
    tuner.observe([*spans(range(1), 1.0), *spans(range(1, 2), 3.0)], 0)
    before = tuner.backward_ms
    tuner.observe([("loss", 0, 2, 0, 0.0, 4.0), ("backward", 0, 2, 0, 5.0, 13.0)], 0)
    assert tuner.backward_ms[0] == pytest.approx(before[0])
    assert tuner.backward_ms[1] == pytest.approx(before[1] + 4.0 / 2)


def test_a_layer_that_once_waited_for_memory_is_not_taken_for_a_slow_one() -> None:
    tuner = Tuner(2, 1)
    tuner.observe([*spans(range(1), 1.0), *spans(range(1, 2), 400.0)], 0)
    for _ in range(4):
        tuner.observe([*spans(range(1), 1.0), *spans(range(1, 2), 3.0)], 0)
    tuner.observe([("backward", 0, 2, 0, 0.0, 8.0)], 0)
    assert tuner.forward_ms == pytest.approx([1.0, 3.0])
    assert tuner.backward_ms == pytest.approx([1.0 + 2.0, 3.0 + 6.0])


def expect(monkeypatch: pytest.MonkeyPatch, tuner: Tuner, now: float, then: float, found: ExecutionPlan) -> None:
    current = tuner.plan
    monkeypatch.setattr(tuning, "partition", lambda *_, **__: found)
    monkeypatch.setattr(tuner, "_expected_ms", lambda plan, *_: now if plan == current else then)


def cut(fused: int) -> ExecutionPlan:
    """Some plan of six layers."""
    return ExecutionPlan([range(0, fused)], [range(fused, 6), range(0, fused)])


def test_thresholds_and_announcements(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rpruntime.tuning")
    tuner = Tuner(6, 2)
    ms = [1.0] * 6
    run(tuner, range(FIRST_LOOK), ms)
    looks = iter(range(FIRST_LOOK, 10_000, REPLAN_INTERVAL))

    def look(then: float, found: ExecutionPlan) -> str:
        expect(monkeypatch, tuner, 100.0, then, found)
        iteration = next(looks)
        news = run(tuner, range(iteration, iteration + 1), ms)
        return news[0] if news else ""

    assert look(98.0, cut(2)) == ""
    assert tuner.plan == ExecutionPlan.one_layer_a_stage(6)
    assert "96 ms an iteration expected (was 100)" in look(96.0, cut(2))  # 4% is enough at first
    assert tuner.plan == cut(2)
    assert look(93.0, cut(3)) == "", "7% are not enough for another change"
    assert tuner.plan == cut(2)
    assert look(91.0, cut(3)) != ""
    assert tuner.plan == cut(3)
    caplog.clear()
    assert look(50.0, cut(4)) == "", "a third change is made and logged, not announced"
    assert tuner.plan == cut(4)
    assert "layers measured: now 3 stages" in caplog.text


def test_looks_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(6, 2)
    looked = []
    monkeypatch.setattr(tuner, "_look", lambda *_, **__: looked.append(tuner.forward_ms))
    run(tuner, range(FIRST_LOOK + 2 * REPLAN_INTERVAL + 1), [1.0] * 6)
    assert len(looked) == 3


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8])
def test_no_device_is_left_without_a_stage(num_layers: int, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(num_layers, num_devices)
    whole = ExecutionPlan([], [range(num_layers)])
    expect(monkeypatch, tuner, 100.0, 1.0, whole)
    run(tuner, range(FIRST_LOOK + 1), [1.0] * num_layers)
    assert tuner.plan.num_stages >= min(num_devices, 2 * num_layers - 1)


def test_memory_limit() -> None:
    free, bound = Tuner(8, 1), Tuner(8, 1, memory_bytes=4000)
    for tuner in (free, bound):
        run(tuner, range(FIRST_LOOK + 1), [1.0] * 7 + [2.0], peak=1000)
    assert free.plan.num_stages == 1  # one device: the whole model is one stage
    # 90% of the memory holds three layers of 1000 bytes.
    assert bound.plan.num_stages > 1
    assert max(len(stage) for stage in (*bound.plan.forward, *bound.plan.backward)) <= 3


def test_layers_that_fit_in_no_stage_change_nothing() -> None:
    tuner = Tuner(4, 1, memory_bytes=1000)
    assert run(tuner, range(FIRST_LOOK + 1), [1.0] * 4, peak=5000) == []
    assert tuner.plan == ExecutionPlan.one_layer_a_stage(4)


def test_a_fixed_plan_never_changes() -> None:
    plan = ExecutionPlan([range(0, 1)], [range(1, 6), range(0, 1)])
    tuner = Tuner(6, 2, fixed=plan)
    assert run(tuner, range(FIRST_LOOK + 2 * REPLAN_INTERVAL), [1.0] * 5 + [9.0]) == []
    assert tuner.plan is plan
    assert tuner.forward_ms == [0.0] * 6


# --- out of memory


def stages(plan: ExecutionPlan) -> list[range]:
    return [*plan.forward, *plan.backward]


def fails(tuner: Tuner, iteration: int, *failed: range, asynchronous: bool = False) -> str:
    """A slot over each of these does not fit; the news of the next iteration."""
    for layers in failed:
        tuner.out_of_memory(layers)
    tuner.before_iteration(iteration, MICROBATCHES, asynchronous=asynchronous)
    news, tuner.news = tuner.news, ""
    return news


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_out_of_memory_the_next_iteration_has_a_plan_under_a_smaller_limit(asynchronous: bool) -> None:
    tuner = Tuner(8, 1, memory_bytes=10 << 30)
    run(tuner, range(FIRST_LOOK + 1), [1.0] * 8, asynchronous=asynchronous, peak=1 << 30)
    assert tuner.plan.num_stages == 1  # 8 GiB by measurement, 9 allowed
    news = fails(tuner, FIRST_LOOK + 1, range(8), asynchronous=asynchronous)
    assert max(map(len, stages(tuner.plan))) <= 6, "0.8 of 8 GiB hold 6 layers"
    plan = tuner.plan
    assert news == (
        f"out of device memory in layers 0 to 7: now {plan.num_stages} stages ({len(plan.forward)} forward, "
        f"{len(plan.backward)} backward) of at most 6.4 GiB"
    )
    # the limit stays: later looks do not go back
    later = range(FIRST_LOOK + 2, FIRST_LOOK + 2 + 3 * REPLAN_INTERVAL)
    run(tuner, later, [1.0] * 8, asynchronous=asynchronous, peak=1 << 30)
    assert max(map(len, stages(tuner.plan))) <= 6


def test_the_limit_is_never_below_the_largest_layer_and_one_layer_a_stage_is_the_end() -> None:
    tuner = Tuner(6, 1, memory_bytes=10_000)
    run(tuner, range(FIRST_LOOK + 1), [1.0] * 6, peak=1000)
    tuner.observe(spans(range(2, 3)), 5000)
    iteration = FIRST_LOOK
    while max(map(len, stages(tuner.plan))) > 1:
        iteration += 1
        before = tuner.plan
        largest = max(stages(before), key=len)
        assert fails(tuner, iteration, largest)
        assert largest not in stages(tuner.plan)
        assert iteration < FIRST_LOOK + 20
    assert tuner._limit() == 5000
    plan = tuner.plan
    news = fails(tuner, iteration + 1, range(2, 3))
    assert news.startswith("out of device memory in layer 2: no smaller stage is possible, so the plan stays; ")
    assert "num_microbatches" in news
    assert tuner.plan is plan
    assert fails(tuner, iteration + 2, range(2, 3)) == "", "once is enough"


def test_a_failed_stage_that_is_not_the_largest_goes_too() -> None:
    tuner = Tuner(6, 2)
    for layer, peak in enumerate([1000, 1000, 50, 50, 2000, 2000]):
        tuner.observe(spans(range(layer, layer + 1)), peak)
    tuner.plan = ExecutionPlan([range(0, 2), range(2, 4)], [range(4, 6), range(2, 4), range(0, 2)])
    fails(tuner, FIRST_LOOK, range(2, 4))
    assert not any(stage.start <= 2 and stage.stop >= 4 for stage in stages(tuner.plan))


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("count", [2, 5, 8])
def test_without_measured_memory_the_failed_stage_is_cut(count: int, num_devices: int) -> None:
    tuner = Tuner(count, num_devices)
    run(tuner, range(FIRST_LOOK + 1), [1.0] * count)
    iteration, seen = FIRST_LOOK, [tuner.plan.num_stages]
    while max(map(len, stages(tuner.plan))) > 1:
        iteration += 1
        largest = max(stages(tuner.plan), key=len)
        news = fails(tuner, iteration, largest)
        assert news.startswith(f"out of device memory in layers {largest.start} to {largest.stop - 1}: now ")
        assert "GiB" not in news
        assert not any(s.start <= largest.start and largest.stop <= s.stop for s in stages(tuner.plan))
        tuner.plan.check_covers(count)
        seen.append(tuner.plan.num_stages)
        # a later look does not put the stage together again
        again = range(iteration + 1, iteration + 2 * REPLAN_INTERVAL)
        run(tuner, again, [1.0] * count)
        iteration = again.stop
        assert not any(s.start <= largest.start and largest.stop <= s.stop for s in stages(tuner.plan))
    assert seen[-1] == 2 * count - 1


@pytest.mark.parametrize(
    "failed, wanted",
    [
        (range(0, 2), ExecutionPlan([range(0, 1), range(1, 2), range(2, 4)], [range(4, 8), range(2, 4), range(1, 2),
                                    range(0, 1)])),
        (range(4, 8), ExecutionPlan([range(0, 2), range(2, 4), range(4, 6)], [range(6, 8), range(4, 6), range(2, 4),
                                    range(0, 2)])),
    ],
)  # fmt: skip
def test_the_plan_is_cut_where_no_better_one_is_known(
    failed: range, wanted: ExecutionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = Tuner(8, 2)
    tuner.plan = ExecutionPlan([range(0, 2), range(2, 4)], [range(4, 8), range(2, 4), range(0, 2)])
    monkeypatch.setattr(tuner, "_best", lambda *_, **__: None)
    fails(tuner, 0, failed)
    assert tuner.plan == wanted


def test_failures_of_iterations_that_were_under_way_change_nothing_more() -> None:
    tuner = Tuner(8, 1)
    run(tuner, range(FIRST_LOOK + 1), [1.0] * 8)
    assert fails(tuner, FIRST_LOOK + 1, range(8), range(8))
    plan = tuner.plan
    assert fails(tuner, FIRST_LOOK + 2, range(8)) == ""
    assert tuner.plan is plan


def test_a_layer_that_failed_alone_is_never_put_together_with_others() -> None:
    tuner = Tuner(6, 1)
    assert "layer 2: no smaller stage" in fails(tuner, 0, range(2, 3))
    run(tuner, range(1, FIRST_LOOK + 2), [1.0] * 6)
    assert {len(stage) for stage in stages(tuner.plan) if 2 in stage} == {1}
    assert max(map(len, stages(tuner.plan))) > 1


def test_a_peak_of_a_stage_that_ran_layer_by_layer_is_no_layers_own() -> None:
    tuner = Tuner(3, 1)
    tuner.observe([*spans(range(1)), *spans(range(1, 2))], 7000)
    assert tuner._peak == [0, 0, 0]
    tuner.observe(spans(range(1, 2)), 3000)
    assert tuner._peak == [0, 3000, 0]


def test_a_fixed_plan_stays_also_out_of_memory() -> None:
    plan = ExecutionPlan([], [range(6)])
    tuner = Tuner(6, 2, fixed=plan)
    assert fails(tuner, 3, range(6)) == ""
    assert tuner.plan is plan
