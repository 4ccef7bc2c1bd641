"""`examples/custom_controller.py`: its schedules are legal on any number of devices, and it runs in real processes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rpruntime.control.coverage import Coverage, TaskOrder
from tests.launching import LAUNCH, ROOT, Run
from tests.leaks import no_leaks

EXAMPLE = ROOT / "examples" / "custom_controller.py"
TABLE = re.compile(
    r"schedule +tasks +bubble +last loss\n"
    r"GPipe +(?P<gpipe>\d+) +\d+\.\d% +(?P<loss>\d+\.\d+)\n"
    r"1F1B +(?P<alternating>\d+) +\d+\.\d% +(?P=loss)\n"
    r"round-robin +(?P<robin>\d+) +\d+\.\d% +(?P=loss)\n"
    r"the losses of all steps are equal\n"
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_controller", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_controller"] = module
    spec.loader.exec_module(module)
    return module


def _orders(tasks: list, count: int) -> list[TaskOrder]:
    every = tuple(range(count))
    return [TaskOrder(t.kind, t.layers, every if t.microbatches is None else tuple(t.microbatches)) for t in tasks]


@pytest.mark.parametrize("devices", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("name", ["one_layer_a_task", "gpipe", "one_forward_one_backward", "round_robin"])
def test_every_schedule_covers_the_model_in_an_order_that_runs(example: ModuleType, name: str, devices: int) -> None:
    count = 5
    done = Coverage(example.LAYERS, (True,) * count, frozenset())
    for order in _orders(getattr(example, name)(example.Costs(), devices, count), count):
        done.add(order)
    assert done.is_complete


def test_a_device_of_1f1b_goes_backward_as_soon_as_it_can(example: ModuleType) -> None:
    tasks = example.one_forward_one_backward(example.Costs(), 3, 4)
    by_device = {d: "".join(f"{t.kind[:2]}{t.microbatches[0]} " for t in tasks if t.device == d) for d in range(3)}
    assert by_device[0] == "fo0 fo1 fo2 ba0 fo3 ba1 ba2 ba3 "
    assert by_device[1] == "fo0 fo1 ba0 fo2 ba1 fo3 ba2 ba3 "
    assert by_device[2] == "fu0 fu1 fu2 fu3 "


def test_stages_are_cut_where_the_dearest_is_cheapest(example: ModuleType) -> None:
    costs = example.Costs()
    costs.forward[-1], costs.backward[-1] = 4.0, 14.0
    assert example.stages_of(costs, 2) == [range(0, 5), range(5, 7)]


def test_it_trains_alike_with_every_schedule(tmp_path: Path) -> None:
    words = ["--width=64", "--rows=64", "--num-microbatches=4", "--steps=2"]
    with no_leaks() as watch:
        run = Run(tmp_path, watch, [*LAUNCH, "--devices=cpu:2", str(EXAMPLE), *words], RPRUNTIME_CHILD_COMMAND="")
        watch.folders.add(run.folder)
        assert run.wait(110) == 0, run.err
    found = TABLE.fullmatch(run.out)
    assert found is not None, (run.out, run.err)
    assert found["gpipe"] == found["alternating"] == "12" and int(found["robin"]) >= 2
