"""Pipeline schedules of one's own on the low-level client: GPipe, 1F1B and round-robin train the same model.

    rplaunch --devices cpu:2 examples/custom_controller.py     two CPU devices, a quarter of a minute
    rplaunch examples/custom_controller.py --width 4096        every GPU

A schedule is a list of tasks: which layers, which micro-batches, on which device. A device takes its tasks in the order
in which they are submitted, each as soon as what it reads is there. GPipe and 1F1B bind the stages to devices, as
pipelines do that keep weights on the device; round-robin, the schedule of the paper, sends each stage to the next
device, so that stages need not be as many as devices, and cuts backward in other places than forward. The numbers are
the same to the bit; what differs is how long devices wait (the bubble), from the times that the tasks bring back.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

import rpruntime as rp

LAYERS = 7
WARM_UP = 1
Schedule = Callable[["Costs", int, int], list[rp.StageTask]]


class Block(nn.Module):
    """`depth` linear layers with a shortcut, [rows, width] -> [rows, width]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def make_model(width: int) -> nn.Sequential:
    """Layers of one weight, and a last one of three: no cut into two stages or three is even."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, 1) for _ in range(LAYERS - 1)), Block(width, 3))


class Costs:
    """What each layer takes, per micro-batch, in milliseconds; backward with the recomputation before it."""

    def __init__(self) -> None:
        self.forward = [1.0] * LAYERS
        self.backward = [3.0] * LAYERS

    def measure(self, results: Sequence[rp.TaskResult]) -> None:
        """Take the times from tasks of one layer each."""
        for layer in range(LAYERS):
            spans = [span for result in results for span in result.spans if span.layers == range(layer, layer + 1)]
            self.forward[layer] = median(s.end_ms - s.start_ms for s in spans if s.phase == "forward")
            backward = median(s.end_ms - s.start_ms for s in spans if s.phase == "backward")
            self.backward[layer] = self.forward[layer] + backward


# --- schedules: tasks in an order in which they can run; the last layers' forward and backward are one task, "fused"


def one_layer_a_task(costs: Costs, devices: int, count: int) -> list[rp.StageTask]:
    """To measure the layers: each alone, all micro-batches, wherever it is its turn."""
    up = [rp.StageTask("forward", range(p, p + 1)) for p in range(LAYERS - 1)]
    down = [rp.StageTask("backward", range(p, p + 1)) for p in reversed(range(LAYERS - 1))]
    return [*up, rp.StageTask("fused", range(LAYERS - 1, LAYERS)), *down]


def stages_of(costs: Costs, devices: int) -> list[range]:
    """One stage a device, cut where the dearest stage is cheapest."""
    weights = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]

    def cut(start: int, parts: int) -> tuple[float, list[range]]:
        if parts == 1:
            return sum(weights[start:]), [range(start, LAYERS)]
        best: tuple[float, list[range]] = (float("inf"), [])
        for stop in range(start + 1, LAYERS - parts + 2):
            worst, rest = cut(stop, parts - 1)
            best = min(best, (max(worst, sum(weights[start:stop])), [range(start, stop), *rest]), key=lambda b: b[0])
        return best

    return cut(0, min(devices, LAYERS))[1]


def gpipe(costs: Costs, devices: int, count: int) -> list[rp.StageTask]:
    """Every device runs its stage forward for all micro-batches, then backward for all."""
    *front, last = stages_of(costs, devices)
    tasks = [rp.StageTask("forward", stage, [m], device) for device, stage in enumerate(front) for m in range(count)]
    tasks += [rp.StageTask("fused", last, [m], len(front)) for m in range(count)]
    back = reversed(list(enumerate(front)))
    return tasks + [rp.StageTask("backward", stage, [m], device) for device, stage in back for m in range(count)]


def one_forward_one_backward(costs: Costs, devices: int, count: int) -> list[rp.StageTask]:
    """A device goes backward as soon as it can; few micro-batches are under way at a time (1F1B)."""
    *front, last = stages_of(costs, devices)
    queues: list[list[rp.StageTask]] = []
    for device, stage in enumerate(front):
        forward = [rp.StageTask("forward", stage, [m], device) for m in range(count)]
        backward = [rp.StageTask("backward", stage, [m], device) for m in range(count)]
        ahead = min(len(front) + 1 - device, count)
        queue = forward[:ahead]
        for m in range(count):
            queue += [backward[m], *forward[ahead + m : ahead + m + 1]]
        queues.append(queue)
    queues.append([rp.StageTask("fused", last, [m], len(front)) for m in range(count)])
    return in_an_order_that_runs(queues)


def in_an_order_that_runs(queues: list[list[rp.StageTask]]) -> list[rp.StageTask]:
    """Devices' queues as one list, in which what a task reads comes before it."""
    found: list[rp.StageTask] = []
    up = dict.fromkeys(range(len(queues[-1])), 0)  # micro-batch -> the next layer to go forward
    down: dict[int, int] = {}  # micro-batch -> the layers from here on have gone backward

    def can_run(task: rp.StageTask) -> bool:
        (m,) = task.microbatches or ()
        return down.get(m) == task.layers.stop if task.kind == "backward" else up[m] == task.layers.start

    while any(queues):
        ready = next(queue for queue in queues if queue and can_run(queue[0]))
        task = ready.pop(0)
        (m,) = task.microbatches or ()
        if task.kind != "backward":
            up[m] = task.layers.stop
        if task.kind != "forward":
            down[m] = task.layers.start
        found.append(task)
    return found


def round_robin(costs: Costs, devices: int, count: int) -> list[rp.StageTask]:
    """The paper's: stages of equal time, more of them backward than forward, each on the next device."""
    plan = rp.schedule.partition(costs.forward, costs.backward, num_devices=devices, num_microbatches=count)
    fused, *backward = plan.backward
    tasks = [rp.StageTask("forward", stage) for stage in plan.forward]
    return [*tasks, rp.StageTask("fused", fused), *(rp.StageTask("backward", stage) for stage in backward)]


# --- training


def bubble_of(results: Sequence[rp.TaskResult], devices: int) -> float:
    """The part of the devices' time in which they waited, from the first computation to the last."""
    begun = min(result.start_ms for result in results if result.start_ms is not None)
    ended = max(result.end_ms for result in results if result.end_ms is not None)
    return 1 - sum(result.busy_ms for result in results) / (devices * (ended - begun))


def train(
    client: rp.Client, schedule: Schedule, costs: Costs, options: argparse.Namespace
) -> tuple[list[float], float, list[rp.TaskResult]]:
    """Train a fresh model; returns losses, the median bubble, and the results of the last iteration's tasks."""
    devices = len(client.session.devices)
    model = make_model(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, bubbles, results = [], [], []
    with client.load_model(model, optimizer, loss_fn=nn.functional.mse_loss) as m:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(options.rows, options.width, generator=generator)
        labels = torch.randn(options.rows, options.width, generator=generator)
        for _ in range(options.steps + WARM_UP):
            it = m.iteration(inputs, labels, num_microbatches=options.num_microbatches)
            futures = it.submit_all(schedule(costs, devices, it.num_microbatches))
            losses.append(float(it.loss()))
            results = [future.result() for future in futures]
            bubbles.append(bubble_of(results, devices))
            m.step().result()
    return losses, median(bubbles[WARM_UP:]), results


def main() -> None:
    """Train with each schedule and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    client = rp.Client.attach()
    costs = Costs()
    _, _, results = train(client, one_layer_a_task, costs, options)
    costs.measure(results)
    schedules = {"GPipe": gpipe, "1F1B": one_forward_one_backward, "round-robin": round_robin}
    print(f"{'schedule':<12} {'tasks':>5} {'bubble':>7}  last loss")
    seen = set()
    for name, schedule in schedules.items():
        losses, bubble, results = train(client, schedule, costs, options)
        seen.add(tuple(losses))
        print(f"{name:<12} {len(results):>5} {bubble:>7.1%}  {losses[-1]:.9f}")
    print("the losses of all steps are equal" if len(seen) == 1 else "THE LOSSES DIFFER")


if __name__ == "__main__":
    main()
