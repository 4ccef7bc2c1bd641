"""What a worker notes of the stages that it runs, and what its replacement does with that."""

from __future__ import annotations

import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpruntime as rp
from rpruntime import ExecutionPlan
from rpruntime.store.arena import Store
from rpruntime.store.handle import Extent, TensorHandle
from rpruntime.wire.codec import pack_struct, unpack_struct
from rpruntime.worker.rehearsal import Notebook, rehearse, rehearses
from rpruntime.worker.stage import Stage
from rpruntime.worker.transfers import CpuTransfers
from tests.reference import PausedSession

ran: list[tuple[str, bool]] = []
"""(class, whether with a graph) of every forward here."""


class Seen(nn.Module):
    def forward(self, x: Any) -> Any:
        ran.append((type(self).__name__, torch.is_grad_enabled() and self.wants_gradients()))
        return self.compute(x)

    def wants_gradients(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())


class Embed(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def compute(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.table(x), "mask": x > 0}


class Block(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def compute(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.linear(x["hidden"]) * x["mask"].unsqueeze(-1)
        return {**x, "hidden": self.norm(hidden.flatten(0, 1)).view_as(hidden)}


class Head(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 11)

    def compute(self, x: dict[str, Tensor]) -> Tensor:
        return self.linear(x["hidden"])


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Choosy(Block):
    """Refuses what no batch of the script holds."""

    refusal: BaseException = ValueError("all zeros")

    def compute(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        if not x["hidden"].any():
            raise self.refusal
        return super().compute(x)


@pytest.fixture
def notes(session: PausedSession, tmp_path: Path) -> Path:
    """Where the first worker of the session notes."""
    path = tmp_path / "worker-0.rehearsal"
    session._workers[0][1]._notebook = Notebook(path)
    return path


def make(session: PausedSession, block: type[Block] = Block, plan: Any = "layers") -> rp.RoundPipe:
    torch.manual_seed(0)
    model = nn.Sequential(Embed(), block(), block(), block(), Head())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return rp.RoundPipe(model, optimizer, loss_fn=loss_fn, num_microbatches=2, plan=plan, session=session)


def train(pipe: rp.RoundPipe, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randint(1, 11, (4, 5), generator=torch.Generator().manual_seed(step))
        losses.append(float(pipe.forward_backward(x, x)))
        pipe.step().result()
    return losses


def rehearsed(notes: Path, session: PausedSession) -> tuple[int, list[tuple[str, bool]]]:
    """How many kinds of stages are run, and the layers that take part."""
    ran.clear()
    found = rehearse(notes, Store(session.segments), CpuTransfers(time.monotonic), [])
    return len(found.stages), list(ran)


def test_each_kind_of_stage_is_run_once(session: PausedSession, notes: Path) -> None:
    with make(session) as pipe:
        train(pipe)
        content = notes.read_bytes()
        assert stat.S_IMODE(notes.stat().st_mode) == 0o600
        assert rehearsed(notes, session)[0] == 5
        assert sorted(ran) == [
            ("Block", False), ("Block", True), ("Embed", False), ("Embed", True), ("Head", True),
        ], "three equal blocks are one"  # fmt: skip
        assert notes.read_bytes() == content, "for the next replacement"


def test_numbers_are_those_of_a_run_without_a_rehearsal(session: PausedSession, notes: Path) -> None:
    with make(session) as pipe:
        undisturbed = train(pipe, 2) + train(pipe, 2)
    with make(session) as pipe:
        disturbed = train(pipe, 2)
        assert rehearsed(notes, session)[0] == 5
        assert disturbed + train(pipe, 2) == undisturbed


def test_stages_of_several_layers_and_the_loss(session: PausedSession, notes: Path) -> None:
    plan = ExecutionPlan([range(0, 2)], [range(2, 5), range(0, 2)])
    with make(session, plan=plan) as pipe:
        train(pipe, 4)
        count, layers = rehearsed(notes, session)
    assert count == 3
    assert [name for name, _ in layers if name == "Head"] == ["Head"]
    assert [name for name, _ in layers].count("Embed") == 2


class Leaving(Choosy):
    refusal = SystemExit("all zeros")


@pytest.mark.parametrize("kind", [Choosy, Leaving])
def test_a_layer_that_refuses_zeros_is_passed_over(
    session: PausedSession, notes: Path, caplog: pytest.LogCaptureFixture, kind: type[Choosy]
) -> None:
    with make(session, kind) as pipe, caplog.at_level("INFO"):
        train(pipe)
        content = notes.read_bytes()
        count, layers = rehearsed(notes, session)
        assert 0 < count < len(layers)
        assert f"{type(kind.refusal).__name__}: all zeros" in caplog.text
        assert notes.read_bytes() == content


def test_a_rehearsal_that_ends_the_process_is_not_tried_again(
    session: PausedSession, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class End(BaseException):
        pass

    def end(*args: Any) -> None:
        raise End

    with make(session) as pipe:
        train(pipe)
        with monkeypatch.context() as patch:
            patch.setattr(Stage, "run", end)
            with pytest.raises(End):
                rehearsed(notes, session)
        assert rehearsed(notes, session) == (0, [])
        session._workers[0][1]._notebook = notebook = Notebook(notes)  # of the next process
        train(pipe)
        assert not notes.exists(), "nobody is to try it again"
        notebook.clear()
        assert not list(notes.parent.iterdir()), "another program may"


def test_notes_go_with_their_model_and_broken_ones_are_ignored(session: PausedSession, notes: Path) -> None:
    with make(session) as pipe:
        train(pipe)
    assert rehearsed(notes, session) == (0, [])
    notes.write_bytes(b"no notes")
    assert rehearsed(notes, session) == (0, [])
    assert rehearsed(notes, session) == (0, [])
    Notebook(notes).clear()
    assert not list(notes.parent.iterdir())


def test_the_next_replacement_knows_what_both_before_it_ran(session: PausedSession, notes: Path) -> None:
    shell = session._workers[0][1]
    with make(session) as pipe:
        train(pipe)
        found = rehearse(notes, Store(session.segments), CpuTransfers(time.monotonic), [])
        shell._notebook, before = Notebook(notes, found), shell._notebook
        shell._notebook._specs = before._specs
        x = torch.ones(4, 5, dtype=torch.long)
        pipe.evaluate([(x, x)])
        count, layers = rehearsed(notes, session)
        assert 5 < count == len(layers) and ("Embed", True) in layers


def test_stages_of_a_new_plan_are_noted_too(session: PausedSession, notes: Path) -> None:
    with make(session) as pipe:
        train(pipe)
        pipe._tuner.plan = ExecutionPlan([range(0, 4)], [range(4, 5), range(0, 4)])
        train(pipe, 4)
        assert rehearsed(notes, session)[0] == 5 + 2, "the head is the same"


def test_a_model_that_cannot_be_built_any_more_takes_no_other_with_it(session: PausedSession, notes: Path) -> None:
    with make(session) as pipe:
        train(pipe)
        whole = unpack_struct(notes.read_bytes())
        (number, handle), nothing = *whole.models, TensorHandle(Extent("nobody", "gone", 0, 8), 0, (8,), (1,), "uint8")
        lost = replace(whole.stages[0], task=replace(whole.stages[0].task, model=number + 1))
        models, stages = ((number + 1, nothing), (number, handle)), (lost, *whole.stages)
        notes.write_bytes(pack_struct(replace(whole, models=models, stages=stages)))
        assert rehearsed(notes, session)[0] == 5
        assert sorted(path.name for path in notes.parent.iterdir()) == [notes.name]


def test_what_cannot_be_noted_is_no_error_of_the_run(
    session: PausedSession, notes: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise TypeError("no bytes for you")

    monkeypatch.setattr("rpruntime.worker.rehearsal.pack_struct", refuse)
    with make(session) as pipe:
        train(pipe)
    assert "no bytes for you" in caplog.text and not notes.exists()
    session._workers[0][1]._notebook = Notebook(notes.parent / "no folder" / "notes")
    monkeypatch.undo()
    with make(session) as pipe:
        train(pipe)
    assert "cannot be written down" in caplog.text


def test_known_segments_are_mapped_and_missing_ones_are_no_error(session: PausedSession, notes: Path) -> None:
    name, _ = session.segments.create(4096)
    seen: list[str] = []
    store = Store(session.segments, lambda segment, memory: seen.append(segment))
    rehearse(notes, store, CpuTransfers(time.monotonic), [name])
    assert seen == [name] and store.known() == {name}


def test_who_rehearses(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> tuple[bool, ...]:
        return tuple(rehearses(torch.device(name), count) for name, count in (("cpu", 2), ("cuda:0", 2), ("cuda:0", 1)))

    assert answers() == (False, True, False)
    monkeypatch.setenv("RPRUNTIME_REHEARSAL", "all")
    assert answers() == (True, True, True)
    monkeypatch.setenv("RPRUNTIME_REHEARSAL", "none")
    assert answers() == (False, False, False)
    monkeypatch.setenv("RPRUNTIME_REHEARSAL", "never")
    with pytest.raises(rp.ConfigError, match="gpu, all, none"):
        answers()
