"""Checkpoints: one version whatever goes on meanwhile, whole or not at all; a resumed run is the same run."""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rpruntime as rp
from launcher import rpctl
from rpruntime import closing
from rpruntime.checkpoints import files as checkpoint_files
from rpruntime.checkpoints.files import CheckpointReader, CheckpointWriter, list_checkpoints, writing_in
from rpruntime.optimizer import events as oe
from rpruntime.optimizer.machine import OptimizerMachine
from rpruntime.wire import messages as msgs
from rpruntime.wire.codec import encode
from tests.leaks import no_leaks, wait_until
from tests.reference import inline, one_thread
from tests.test_processes import inline_result

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "scripts" / "train_checkpoints.py"


def build(seed: int = 0, order: str = "ab", hidden: int = 12) -> tuple[Any, Any, Any]:
    """A model with BatchNorm, dropout and a frozen parameter, its optimizer and a scheduler."""
    torch.manual_seed(seed)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in order:
                setattr(self, name, nn.Linear(hidden, hidden))

        def forward(self, x: Any) -> Any:
            return self.b(torch.relu(self.a(x)))

    model = nn.Sequential(nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.2), Two(), nn.Linear(hidden, 2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def wrap(session: Any, built: Any, **settings: Any) -> Any:
    model, optimizer, scheduler = built
    pipe = rp.RoundPipe(
        model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=3, session=session, **{"seed": 5, **settings}
    )
    pipe.register_for_checkpointing(scheduler)
    return pipe


def train(pipe: Any, built: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        dtype = built[0][0].weight.dtype
        losses.append(pipe.forward_backward(torch.randn(6, 6).to(dtype), torch.randn(6, 2).to(dtype)))
        pipe.step(max_grad_norm=1.0)
        built[2].step()
    return [float(loss) for loss in losses]


def everything(pipe: Any, built: Any) -> list[Any]:
    """All that a run consists of; equal lists are equal bit for bit."""
    pipe.synchronize()
    model, optimizer, scheduler = built
    state = optimizer.state_dict()
    tensors = [*model.state_dict().items()]
    tensors += [(f"{key} {name}", v) for key, row in state["state"].items() for name, v in sorted(row.items())]
    return [
        [(name, value.dtype, tuple(value.shape), value.double().tolist()) for name, value in tensors],
        [group["lr"] for group in optimizer.param_groups],
        scheduler.last_epoch,
        torch.get_rng_state().tolist(),
    ]


# --- the same run


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_resumed_run_is_the_same_run_on_other_workers_and_plans(tmp_path, asynchronous, dtype):
    with one_thread():
        with inline() as session:
            built = build()
            pipe = wrap(session, built, asynchronous=asynchronous, dtype=dtype)
            torch.manual_seed(1)
            train(pipe, built, 5)
            handle = pipe.save_checkpoint(tmp_path, extra={"sample": 30})
            assert handle.result() == str(tmp_path / "step-5") and handle.done()
            losses = train(pipe, built, 5)
            expected = everything(pipe, built)
            pipe.close()
        for workers, plan, before in ((3, "layers", 0), (2, "auto", 3)):
            with inline(workers=workers) as session:
                built = build(seed=9)
                pipe = wrap(session, built, asynchronous=asynchronous, dtype=dtype, plan=plan, seed=77)
                torch.manual_seed(3)
                train(pipe, built, before)
                pipe.forward_backward(torch.randn(6, 6).to(dtype), torch.randn(6, 2).to(dtype))  # discarded
                info = pipe.load_checkpoint(tmp_path)
                assert (info.step, info.extra) == (5, {"sample": 30})
                assert train(pipe, built, 5) == losses
                assert pipe.last_step.step == 9
                assert everything(pipe, built) == expected
                pipe.close()


def test_loading_goes_back_in_the_same_run_again_and_again(tmp_path):
    with one_thread(), inline(workers=2) as session:
        built = build()
        pipe = wrap(session, built, asynchronous=True)
        torch.manual_seed(1)
        train(pipe, built, 3)
        pipe.save_checkpoint(tmp_path)
        losses = train(pipe, built, 3)
        expected = everything(pipe, built)
        for _ in range(3):
            pipe.load_checkpoint(tmp_path)
            assert train(pipe, built, 3) == losses
            assert everything(pipe, built) == expected
        pipe.close()


def test_parameters_are_matched_by_name(tmp_path):
    with one_thread(), inline() as session:
        built = build(order="ab")
        pipe = wrap(session, built)
        train(pipe, built, 2)
        pipe.save_checkpoint(tmp_path, wait=True)
        pipe.synchronize()
        expected = {name: value.clone() for name, value in built[0].state_dict().items()}
        pipe.close()
        built = build(seed=3, order="ba")
        pipe = wrap(session, built)
        pipe.load_checkpoint(tmp_path)
        assert all(torch.equal(expected[name], value) for name, value in built[0].state_dict().items())
        pipe.close()


def test_gradients_without_a_step_are_not_saved(tmp_path):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        train(pipe, built, 1)
        pipe.synchronize()
        buffers = built[0][1].running_mean.clone()
        pipe.forward_backward(torch.randn(6, 6), torch.randn(6, 2))
        pipe.save_checkpoint(tmp_path)
        assert pipe.gradients()
        pipe.load_checkpoint(tmp_path)
        assert not pipe.gradients() and torch.equal(built[0][1].running_mean, buffers)
        pipe.close()


def test_an_optimizer_with_values_of_its_own_in_groups_and_state(tmp_path):
    class Counting(torch.optim.SGD):
        """Keeps a number in its group and plain and nested values in its state."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                for p in group["params"]:
                    self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                    self.state[p]["nested"] = [torch.ones(2) * group["k"]]
                    if p.grad is not None:
                        p.data.add_(p.grad, alpha=-group["lr"] / group["k"])

    def make(session: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        optimizer = Counting(model.parameters(), lr=0.1)
        return (
            model,
            optimizer,
            rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=1, session=session),
        )

    def run(pipe: Any) -> list[float]:
        found = []
        for _ in range(3):
            found.append(float(pipe.forward_backward(torch.ones(2, 3), torch.zeros(2, 1))))
            pipe.step()
        return found

    with one_thread(), inline() as session:
        _, _, pipe = make(session)
        run(pipe)
        pipe.save_checkpoint(tmp_path)
        losses = run(pipe)
        pipe.close()
        _, optimizer, pipe = make(session)
        pipe.load_checkpoint(tmp_path)
        assert run(pipe) == losses
        pipe.synchronize()
        assert {row["seen"] for row in optimizer.state_dict()["state"].values()} == {6}
        assert {row["nested"][0][0].item() for row in optimizer.state_dict()["state"].values()} == {6.0}
        pipe.close()


# --- weights alone


def test_load_state_dict_and_torch_save(tmp_path):
    with one_thread(), inline(workers=2) as session:
        built = build()
        pipe = wrap(session, built, asynchronous=True)
        train(pipe, built, 2)
        pipe.synchronize()
        torch.save(built[0].state_dict(), tmp_path / "weights.pt")
        size = sum(value.nbytes for value in built[0].state_dict().values())
        assert (tmp_path / "weights.pt").stat().st_size < size + 10_000  # not the segments that they are views of
        saved = torch.load(tmp_path / "weights.pt")
        before = everything(pipe, built)
        train(pipe, built, 2)
        moments = everything(pipe, built)[0][len(saved) :]
        assert pipe.load_state_dict(saved).missing_keys == []
        after = everything(pipe, built)[0]
        assert after[: len(saved)] == before[0][: len(saved)] and after[len(saved) :] == moments
        train(pipe, built, 1)
        assert pipe.last_step.step == 4
        del saved["4.bias"]
        for bad in (
            saved,
            {**saved, "4.bias": torch.zeros(7)},
            {**saved, "4.bias": torch.zeros(2), "x": torch.zeros(1)},
        ):
            with pytest.raises(RuntimeError, match=r"4\.bias|unexpected key x"):
                pipe.load_state_dict(bad)
        now = everything(pipe, built)[0]
        assert pipe.load_state_dict({"0.bias": torch.full((12,), 2.0)}, strict=False).missing_keys
        changed = [new for new, old in zip(everything(pipe, built)[0], now, strict=True) if new != old]
        assert [(name, value) for name, _, _, value in changed] == [("0.bias", [2.0] * 12)]
        pipe.close()


def test_optimizer_load_state_dict_before_and_after_wrapping():
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        train(pipe, built, 2)
        state = copy.deepcopy(everything(pipe, built) and built[1].state_dict())
        weights = {name: value.clone() for name, value in built[0].state_dict().items()}
        with pytest.raises(rp.RoundPipeError, match="load_checkpoint"):
            built[1].load_state_dict(state)
        pipe.close()
        built = build(seed=4)
        built[0].load_state_dict(weights)
        built[1].load_state_dict(state)
        pipe = wrap(session, built)
        pipe.synchronize()
        for key, row in built[1].state_dict()["state"].items():
            assert all(torch.equal(row[name], value) for name, value in state["state"][key].items())
        pipe.close()


# --- what is refused


def damage(path: Path, how: str) -> None:
    if how == "cut":
        file = path / "unit-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
    elif how == "flipped":
        data = bytearray((path / "unit-00000.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "unit-00000.safetensors").write_bytes(data)
    elif how == "missing":
        (path / "script.pt").unlink()
    elif how == "meta":
        (path / "checkpoint.json").write_text((path / "checkpoint.json").read_text()[:100])
    elif how == "version":
        meta = json.loads((path / "checkpoint.json").read_text())
        (path / "checkpoint.json").write_text(json.dumps({**meta, "format": 99}))


@pytest.mark.parametrize(
    "how, reason",
    [
        ("cut", r"unit-00000\.safetensors is \d+ bytes long instead of"),
        ("flipped", "not those that were written"),
        ("missing", r"script\.pt is missing"),
        ("meta", r"checkpoint\.json cannot be read"),
        ("version", "format 99"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(tmp_path, how, reason):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        train(pipe, built, 1)
        pipe.save_checkpoint(tmp_path)
        train(pipe, built, 1)
        before = everything(pipe, built)
        damage(tmp_path / "step-1", how)
        for folder in (tmp_path, tmp_path / "step-1"):
            with pytest.raises(rp.CheckpointError, match=reason):
                pipe.load_checkpoint(folder)
        assert everything(pipe, built) == before
        pipe.close()


def test_the_newest_complete_one_is_loaded_and_a_damaged_one_is_named(tmp_path):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        for _ in range(2):
            train(pipe, built, 1)
            pipe.save_checkpoint(tmp_path)
        damage(tmp_path / "step-2", "cut")
        with pytest.warns(UserWarning, match=r"step-2 is passed over.*bytes long"):
            assert pipe.load_checkpoint(tmp_path).step == 1
        pipe.close()


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        train(pipe, built, 1)
        pipe.save_checkpoint(tmp_path)
        pipe.close()

        def refused(reason: str, built: Any, register: bool = True, **settings: Any) -> None:
            pipe = wrap(session, built, **settings)
            if not register:
                pipe._model.checkpoints.script.registered.clear()
            before, step = everything(pipe, built), pipe._model.client.machine.step_number(pipe._model.number)
            with pytest.raises(rp.CheckpointError, match=reason):
                pipe.load_checkpoint(tmp_path)
            assert (
                everything(pipe, built) == before and pipe._model.client.machine.step_number(pipe._model.number) == step
            )
            train(pipe, built, 1)
            pipe.close()

        refused(r"0\.weight has shape \[12, 6\] there and \[8, 6\] here", build(hidden=8))
        refused(r"0\.weight has dtype float32 there and bfloat16 here", build(), dtype=torch.bfloat16)
        frozen = build()
        frozen[0][4].weight.requires_grad_(False)
        refused(r"4\.weight is trained there and frozen here", frozen)
        model, _, _ = build()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        refused("the optimizer is .*AdamW there and .*SGD here", (model, sgd, torch.optim.lr_scheduler.StepLR(sgd, 1)))
        refused("registered objects: StepLR; here are none", build(), register=False)
        longer = build()
        longer[0].append(nn.Linear(2, 2).requires_grad_(False))
        refused(r"5\.weight is not in it", longer)
    with inline() as session, pytest.raises(rp.CheckpointError, match="no folder"):
        wrap(session, build()).load_checkpoint(tmp_path / "nowhere")


def test_a_registered_object_that_refuses_its_state_changes_nothing(tmp_path):
    class Loader:
        position, picky = 0, False

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.picky and state["position"] == 4:
                raise ValueError("no such place")
            self.position = state["position"]

    with one_thread(), inline() as session:
        built, loader = build(), Loader()
        pipe = wrap(session, built)
        pipe.register_for_checkpointing(loader)
        loader.position = 4
        train(pipe, built, 1)
        pipe.save_checkpoint(tmp_path)
        loader.position, loader.picky = 7, True
        train(pipe, built, 1)
        before = everything(pipe, built)
        with pytest.raises(rp.CheckpointError, match=r"Loader does not take its state.*no such place"):
            pipe.load_checkpoint(tmp_path)
        assert everything(pipe, built) == before and loader.position == 7
        loader.picky = False
        pipe.load_checkpoint(tmp_path)
        assert loader.position == 4
        with pytest.raises(rp.ConfigError, match="no state_dict"):
            pipe.register_for_checkpointing(3)
        pipe.close()


def test_no_room_for_buffers_changes_nothing(tmp_path, monkeypatch):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        train(pipe, built, 1)
        pipe.save_checkpoint(tmp_path)
        train(pipe, built, 2)
        before = everything(pipe, built)
        allocate, asked = pipe._model.client.arena.allocate_tensor, []

        def no_room(*what: Any) -> Any:
            asked.append(what)
            if len(asked) > 2:
                raise rp.HostMemoryError("no memory left")
            return allocate(*what)

        used = pipe._model.client.machine.step_number(pipe._model.number)
        monkeypatch.setattr(pipe._model.client.arena, "allocate_tensor", no_room)
        with pytest.raises(rp.HostMemoryError):
            pipe.load_checkpoint(tmp_path)
        monkeypatch.undo()
        assert everything(pipe, built) == before and used == pipe._model.client.machine.step_number(pipe._model.number)
        train(pipe, built, 1)
        pipe.load_checkpoint(tmp_path)
        assert built[2].last_epoch == 1
        pipe.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, rp.WorkerDied, rp.SessionLost, ValueError])
def test_what_ends_a_load_half_way_keeps_its_type(tmp_path, monkeypatch, error):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        pipe.save_checkpoint(tmp_path, wait=True)

        def fail(*_: Any, **__: Any) -> None:
            raise error("x")

        monkeypatch.setattr(pipe._model.checkpoints._restoring, "_restore_unit", fail)
        with pytest.raises(rp.CheckpointError if error is ValueError else error):
            pipe.load_checkpoint(tmp_path)
        kept = error if issubclass(error, rp.RoundPipeError) else rp.CheckpointError
        with pytest.raises(kept):
            pipe.forward_backward(torch.randn(6, 6), torch.randn(6, 2))
        with pytest.raises(kept):
            pipe.close()


def test_buffers_of_wrapped_layers_are_replaced_by_name():
    from tests.tiny_models import tiny

    model = tiny("llama")
    model.model.layers[1].mlp.register_buffer("seen", torch.zeros(3))
    with one_thread(), inline() as session:
        with rp.RoundPipe(model, None, num_microbatches=1, session=session) as pipe:
            pipe.synchronize()
            state = {name: value.clone() for name, value in model.state_dict().items()}
            state["model.layers.1.mlp.seen"] = torch.arange(3.0)
            pipe.load_state_dict(state)
            assert model.model.layers[1].mlp.seen.tolist() == [0.0, 1.0, 2.0]


def test_what_cannot_be_saved_is_said_at_the_call(tmp_path):
    with inline() as session:
        built = build()
        pipe = wrap(session, built)
        with pytest.raises(rp.CheckpointError, match=r"extra\['lock'\]"):
            pipe.save_checkpoint(tmp_path, extra={"lock": threading.Lock()})
        with pytest.raises(rp.ConfigError, match="keep"):
            pipe.save_checkpoint(tmp_path, keep=0)
        pipe.close()


def test_a_scheduler_that_is_not_registered_is_warned_about_once(tmp_path):
    with inline() as session:
        model, optimizer, scheduler = build()
        with rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, session=session) as pipe:
            with pytest.warns(UserWarning, match="register_for_checkpointing"):
                pipe.save_checkpoint(tmp_path, wait=True)
            pipe.register_for_checkpointing(scheduler)
            pipe.save_checkpoint(tmp_path, wait=True)


# --- whole or not at all


def test_keep_and_the_same_step_again(tmp_path):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        for _ in range(4):
            train(pipe, built, 1)
            pipe.save_checkpoint(tmp_path, keep=2, wait=True)
        assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]
        inode = (tmp_path / "step-3" / "frozen-00001.safetensors").stat().st_ino
        assert (
            tmp_path / "step-4" / "frozen-00001.safetensors"
        ).stat().st_ino == inode  # frozen weights are there once
        pipe.save_checkpoint(tmp_path, extra="again", keep=1, wait=True)
        assert os.listdir(tmp_path) == ["step-4"]
        assert pipe.load_checkpoint(tmp_path).extra == "again"
        pipe.close()


def test_a_full_disk_is_said_and_leaves_the_run_and_the_older_checkpoint_alone(tmp_path, monkeypatch, capfd):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        torch.manual_seed(2)
        train(pipe, built, 1)
        pipe.save_checkpoint(tmp_path, wait=True)
        train(pipe, built, 1)
        before = everything(pipe, built)
        write = CheckpointWriter._write

        def full(self: Any, name: str, chunks: Any) -> None:
            if name == "script.pt":
                raise OSError(errno.ENOSPC, "No space left on device", str(self._partial / name))
            write(self, name, chunks)

        monkeypatch.setattr(CheckpointWriter, "_write", full)
        handle = pipe.save_checkpoint(tmp_path, keep=1)
        with pytest.raises(rp.CheckpointError, match=r"step-2.*disk is full.*MiB are free.*training goes on"):
            handle.result()
        monkeypatch.undo()
        assert "the disk is full" in capfd.readouterr().err
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limit[1]))
        try:
            handle = pipe.save_checkpoint(tmp_path, keep=1)
            with pytest.raises(rp.CheckpointError, match="the disk is full or limited"):
                handle.result()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert os.listdir(tmp_path) == ["step-1"]
        assert everything(pipe, built) == before
        assert pipe.save_checkpoint(tmp_path, keep=1, wait=True).done()
        assert os.listdir(tmp_path) == ["step-2"]
        pipe.close()


def test_a_failed_call_cancels_the_saves_after_it_and_no_others(tmp_path):
    class Fails(nn.Module):
        def forward(self, x: Any) -> Any:
            if (x == 7).any():
                raise ValueError("seven")
            return x

    with one_thread(), inline() as session:
        model = nn.Sequential(Fails(), nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        pipe = rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=1, session=session)
        good, bad, labels = torch.ones(2, 2), torch.full((2, 2), 7.0), torch.ones(2, 1)
        session.paused = True
        pipe.forward_backward(good, labels)
        pipe.step()
        first = pipe.save_checkpoint(tmp_path)
        pipe.forward_backward(bad, labels)
        pipe.step()
        second = pipe.save_checkpoint(tmp_path)
        assert not first.done() and not second.done()
        session.paused = False
        with pytest.raises(ValueError, match="seven"):
            pipe.synchronize()
        assert first.result() == str(tmp_path / "step-1")
        with pytest.raises(rp.CheckpointError, match="a call before it failed"):
            second.result()
        pipe.forward_backward(good, labels)
        pipe.step()
        assert pipe.save_checkpoint(tmp_path, wait=True).result() == str(tmp_path / "step-2")
        pipe.close()


def test_a_save_that_has_no_room_for_a_copy_fails_alone(tmp_path, monkeypatch):
    from rpruntime.optimizer.snapshots import Copies

    def no_room(*_: Any) -> Any:
        raise rp.HostMemoryError("no memory left")

    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        train(pipe, built, 1)
        monkeypatch.setattr(Copies, "copy", no_room)
        with pytest.raises(rp.CheckpointError, match="no memory left"):
            pipe.save_checkpoint(tmp_path, wait=True)
        monkeypatch.undo()
        train(pipe, built, 1)
        pipe.save_checkpoint(tmp_path, wait=True)
        pipe.close()


def fake_checkpoint(folder: Path, step: int, keep: int) -> None:
    writer = CheckpointWriter(folder, step, lambda nbytes: None)
    checkpoint_files.prune(folder, keep, writer.finish({}))


@pytest.mark.parametrize("keep", [1, 4, 6])
def test_so_many_are_kept_as_were_asked_for(tmp_path, keep):
    for step in range(1, 9):
        fake_checkpoint(tmp_path, step, keep)
        assert [entry.step for entry in list_checkpoints(tmp_path)] == list(range(1, step + 1))[-keep:]


def test_what_killed_runs_have_left_goes_and_what_this_run_writes_stays(tmp_path):
    for name in (".step-1.partial", ".step-2.partial"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".step-1.partial", (1e9, 1e9))
    fake_checkpoint(tmp_path, 3, 1)
    assert sorted(os.listdir(tmp_path)) == [".step-2.partial", "step-3"]


@pytest.mark.parametrize(
    "meta", [{"format": 1}, {"format": 1, "date": 1.0, "step": 1, "files": {"x": 3}}, {"format": 2, "date": "x"}, [1]]
)
def test_a_malformed_one_hides_no_other(tmp_path, meta, capsys):
    fake_checkpoint(tmp_path, 1, 4)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "checkpoint.json").write_text(json.dumps(meta))
    with pytest.raises(rp.CheckpointError, match=r"cannot be read|do not fit its sum|format 2"):
        CheckpointReader(tmp_path / "step-2")
    assert {entry.step for entry in list_checkpoints(tmp_path)} == {1, 2}
    assert checkpoint_files.find_checkpoint(tmp_path)[0].name == "step-1"
    assert rpctl.main(["checkpoint", str(tmp_path)]) == 0


def test_a_changed_byte_of_the_description_is_noticed(tmp_path):
    fake_checkpoint(tmp_path, 1, 4)
    path = tmp_path / "step-1" / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 2', 1))
    with pytest.raises(rp.CheckpointError, match="do not fit its sum"):
        CheckpointReader(tmp_path / "step-1")


def test_older_ones_that_cannot_be_removed_fail_no_save(tmp_path, monkeypatch):
    def broken(*_: Any) -> None:
        raise KeyError("date")

    with one_thread(), inline() as session:
        pipe = wrap(session, build())
        monkeypatch.setattr("rpruntime.checkpoints.saves.prune", broken)
        assert pipe.save_checkpoint(tmp_path, keep=1, wait=True).result() == str(tmp_path / "step-0")
        pipe.close()


def test_frozen_weights_that_were_loaded_are_written_anew(tmp_path):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        pipe.save_checkpoint(tmp_path / "a", wait=True)
        pipe.load_state_dict({"0.bias": torch.full((12,), 2.0)}, strict=False)
        pipe.save_checkpoint(tmp_path / "b", wait=True)
        for folder, expected in (("a", None), ("b", 2.0)):
            found = CheckpointReader(tmp_path / folder / "step-0").tensor(("weight", "0.bias", ""))
            assert bool((found == 2.0).all()) == (expected is not None)
        pipe.load_checkpoint(tmp_path / "a")
        pipe.save_checkpoint(tmp_path / "c", wait=True)
        found = CheckpointReader(tmp_path / "c" / "step-0").tensor(("weight", "0.bias", ""))
        assert not bool((found == 2.0).all())
        pipe.close()


class FailingSGD(torch.optim.SGD):
    """Raises in its second step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            if group["k"] > 1:
                raise ValueError("no step for you")
        return super().step(closure)


@pytest.mark.parametrize("threaded", [False, True])
def test_no_save_waits_for_a_step_that_an_optimizer_refused(tmp_path, threaded):
    with one_thread(), inline() as session:
        model = nn.Sequential(nn.Linear(2, 1))
        optimizer = FailingSGD(model.parameters(), lr=0.1)
        pipe = rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=1, session=session)
        pipe.forward_backward(torch.ones(2, 2), torch.ones(2, 1))
        pipe.step()
        pipe.save_checkpoint(tmp_path, wait=True)
        session.paused = True
        pipe.forward_backward(torch.ones(2, 2), torch.ones(2, 1))
        pipe.step()
        saves = [pipe.save_checkpoint(tmp_path) for _ in range(2)]
        if threaded:  # what waits is a thread, as in a session of processes
            waits = pipe._model.client.wait
            pipe._model.client.wait = lambda ready, what, timeout_s=None: [waits, wait_outside][
                threading.current_thread().name == "rpruntime-checkpoint"
            ](ready, what, timeout_s)

            def wait_outside(ready: Any, what: str, timeout_s: Any) -> bool:
                client = pipe._model.client

                def is_ready() -> bool:
                    with client.lock:
                        return ready()

                wait_until(is_ready, 30.0, what)
                return True

            pipe._model.checkpoints.saves.inline = False
            pipe._model.checkpoints.saves._start_writer()
        session.paused = False
        with pytest.raises(ValueError, match="no step for you"):
            pipe.synchronize()
        for save in saves:
            with pytest.raises(rp.CheckpointError, match=r"step-2.*no step for you"):
                save.result(20.0)
        with pytest.raises(ValueError, match="no step for you"):
            pipe.close()
        assert os.listdir(tmp_path) == ["step-1"]


def test_a_save_ends_when_the_session_breaks_and_when_its_pipe_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("rpruntime.closing.ABANDON_TIMEOUT_S", 0.1)
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        session.paused = True
        pipe.forward_backward(torch.randn(6, 6), torch.randn(6, 2))
        pipe.step()
        handle = pipe.save_checkpoint(tmp_path)
        assert not handle.done()
        pipe._model.client._broken = rp.WorkerDied("the optimizer died")
        with pytest.raises(rp.CheckpointError, match="the optimizer died"):
            handle.result()
        pipe._model.client._broken = None
        handle = pipe.save_checkpoint(tmp_path)
        closing.end(pipe._model)
        with pytest.raises(rp.CheckpointError, match=r"closed before its step|before it failed"):
            handle.result()
        assert os.listdir(tmp_path) == []
        session.paused = False
        pipe._model.client._drive()


def test_a_dropped_save_says_why_wherever_it_is(tmp_path, monkeypatch):
    from rpruntime.checkpoints.filling import Filler

    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        write = Filler._write_unit

        def dropped(self: Any, *rest: Any) -> None:
            write(self, *rest)
            running = pipe._model.checkpoints.saves._running
            for number in list(running):
                pipe._model.client.machine._checkpoints._drop(pipe._model.number, number)
                running[number].failure = "a call before it failed"

        monkeypatch.setattr(Filler, "_write_unit", dropped)
        monkeypatch.setattr(Filler, "_await", lambda self, save, ready, what: None)
        with pytest.raises(rp.CheckpointError, match="a call before it failed"):
            pipe.save_checkpoint(tmp_path, wait=True)
        pipe.close()


def test_an_interrupted_writer_does_not_take_later_saves_with_it(tmp_path, monkeypatch):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        write = CheckpointWriter._write

        def interrupted(self: Any, name: str, chunks: Any) -> None:
            raise SystemExit

        monkeypatch.setattr(CheckpointWriter, "_write", interrupted)
        saves = pipe._model.checkpoints.saves
        with pytest.raises(SystemExit):
            pipe.save_checkpoint(tmp_path)
        saves.inline = False
        handle = pipe.save_checkpoint(tmp_path)
        with pytest.raises(rp.CheckpointError, match="SystemExit"):
            handle.result(20.0)
        saves.finish()
        # it would look for the next save before the script has sent it, and inline that means never
        wait_until(lambda: saves._thread is None, 10, "the writer ends")
        monkeypatch.setattr(CheckpointWriter, "_write", write)
        assert pipe.save_checkpoint(tmp_path).result(20.0) == str(tmp_path / "step-0")
        pipe.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_at_every_moment_of_a_save_leave_one_that_loads(tmp_path):
    script = ROOT / "tests" / "scripts" / "killed_saves.py"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, script, tmp_path], env=environ, capture_output=True, text=True, timeout=380)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) >= 10 and all(same for _, _, same in rows), rows
    assert {moment: step for moment, step, _ in rows} == {
        moment: 2 if moment.startswith("renamed") else 1 for moment, _, _ in rows
    }


# --- the optimizer's machine


def snapshot_machine(asynchronous: bool = False) -> OptimizerMachine:
    import random

    from tests.cluster import make_spec

    machine = OptimizerMachine(())
    machine.handle(make_spec(1, random.Random(4), 3, asynchronous=asynchronous, grain="stage"))
    return machine


def test_a_step_waits_for_the_units_that_a_save_has_not_copied_and_for_no_others():
    machine = snapshot_machine()
    model = machine._models[1]
    trainable = [unit.index for unit in model.spec.units if unit.trainable]
    assert len(trainable) > 1
    model.master = {unit.index: None for unit in model.spec.units}
    out = machine.handle(msgs.SnapshotMsg(1, 5, 0, 1 << 40))
    copies = [i for i in out if isinstance(i, oe.CopyUnit)]
    assert len(copies) == 1
    first = copies[0].unit
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 1, ()))
    out = machine.handle(msgs.StepMsg(1, 0, (1,), ({},), None))
    assert not [i for i in out if isinstance(i, oe.StepUnit)]
    out = machine.handle(oe.UnitCopiedEvent(1, 5, first, 100))
    assert [i.unit for i in out if isinstance(i, oe.StepUnit)] == [first]
    out, left = machine.handle(msgs.SnapshotEndMsg(1, 5)), set(trainable) - {first}
    assert not [i for i in out if isinstance(i, oe.StepUnit)], "one unit at a time"
    unit = first
    while left:
        (unit,) = [i.unit for i in machine.handle(oe.UnitSteppedEvent(1, 0, unit, None)) if isinstance(i, oe.StepUnit)]
        left.remove(unit)


def test_a_save_copies_in_the_order_of_the_step_that_waits_for_it():
    machine = snapshot_machine(asynchronous=True)
    model = machine._models[1]
    model.master = {unit.index: None for unit in model.spec.units}
    out, copied, stepped = machine.handle(msgs.SnapshotMsg(1, 5, 0, 1 << 40)), [], []
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 1, ()), msgs.StepMsg(1, 0, (1,), ({},), None))
    while out:
        copies = [i.unit for i in out if isinstance(i, oe.CopyUnit)]
        steps = [i.unit for i in out if isinstance(i, oe.StepUnit)]
        copied, stepped = copied + copies, stepped + steps
        out = [i for unit in copies for i in machine.handle(oe.UnitCopiedEvent(1, 5, unit, 100))]
        out += [i for unit in steps for i in machine.handle(oe.UnitSteppedEvent(1, 0, unit, None))]
    assert copied == stepped == model.units_in_order() and len(copied) > 1


def test_no_more_units_are_copied_than_there_is_room_for():
    machine = snapshot_machine()
    out = machine.handle(msgs.SnapshotMsg(1, 5, 0, 150))
    asked = [i.unit for i in out if isinstance(i, oe.CopyUnit)]
    out = machine.handle(oe.UnitCopiedEvent(1, 5, asked[0], 100))
    asked += [i.unit for i in out if isinstance(i, oe.CopyUnit)]
    assert len(asked) == 2
    out = machine.handle(oe.UnitCopiedEvent(1, 5, asked[1], 100))
    assert not [i for i in out if isinstance(i, oe.CopyUnit)]


def test_no_message_is_too_large_with_thousands_of_parameters(tmp_path, monkeypatch):
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2500)])

        def forward(self, x: Any) -> Any:
            return x * torch.cat(list(self.values)).sum()

    with one_thread(), inline() as session:
        sizes: dict[str, int] = {}

        def watch(post: Any) -> None:
            send = post.send

            def checked(role: str, msg: Any) -> None:
                size = sum(len(frame) for frame in encode(msg))
                sizes[type(msg).__name__] = max(sizes.get(type(msg).__name__, 0), size)
                send(role, msg)

            monkeypatch.setattr(post, "send", checked)

        watch(session.post)
        watch(session._optimizer[0])
        model = nn.Sequential(Many())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        pipe = rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=1, session=session)
        pipe.forward_backward(torch.ones(2, 1), torch.ones(2, 1))
        assert len(pipe.gradients()) == 2500
        pipe.step()
        pipe.synchronize()
        assert len(optimizer.state_dict()["state"]) == 2500
        pipe.save_checkpoint(tmp_path, wait=True)
        pipe.load_checkpoint(tmp_path)
        pipe.close()
        assert {"StateMsg", "RestoreUnitMsg"} <= sizes.keys() and max(sizes.values()) < 1 << 20, sizes


# --- rpctl


def test_rpctl_lists_checkpoints(tmp_path, capsys):
    with one_thread(), inline() as session:
        built = build()
        pipe = wrap(session, built)
        for _ in range(3):
            train(pipe, built, 1)
            pipe.save_checkpoint(tmp_path, wait=True)
        pipe.close()
    damage(tmp_path / "step-2", "cut")
    shutil.copytree(tmp_path / "step-3", tmp_path / ".step-4.partial")
    assert rpctl.main(["checkpoint", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "step-3" in lines[3] + lines[4] and "not complete" in "".join(lines)
    assert rpctl.main(["checkpoint", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["step"]: row["complete"] for row in rows} == {1: True, 2: False, 3: True, 4: False}
    assert all(row["bytes"] > 0 for row in rows)
    assert [entry.step for entry in list_checkpoints(tmp_path) if entry.complete] == [1, 3]
    assert rpctl.main(["checkpoint", str(tmp_path / "nowhere")]) == 1
    assert rpctl.main(["checkpoint"]) == 2


# --- processes


def script(folder: Path, *flags: str, devices: str = "cpu:2", **more: str) -> dict[str, Any]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RPRUNTIME_", "SCRIPT_"))}
    kept["OMP_NUM_THREADS"] = "1"  # of an inline session
    with no_leaks(within_s=15.0) as watch:
        run = subprocess.run(
            [sys.executable, "-m", "launcher", "--devices", devices, *flags, str(SCRIPT)],
            env={**kept, "PYTHONPATH": str(ROOT), **watch.environ, "SCRIPT_FOLDER": str(folder), **more},
            capture_output=True,
            text=True,
            timeout=150,
            preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),  # one thread a worker
        )
    if run.returncode:
        return {"code": run.returncode, "stderr": run.stderr}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def weights_of(path: Path) -> list[Any]:
    """All tensors of a checkpoint, by place."""
    reader = CheckpointReader(path)
    return sorted((place, reader.tensor(place).double().tolist()) for place in reader._places)


WHOLE = {"SCRIPT_STEPS": "10", "SCRIPT_SAVE": "1,2,3,5"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Ten steps in processes, with saves that nobody waits for while the optimizer is slow."""
    folder = tmp_path_factory.mktemp("whole")
    run = script(folder, SCRIPT_SLOW="0.05", **WHOLE)
    assert [Path(path).name for path in run["paths"]] == ["step-1", "step-2", "step-3", "step-5"], run
    return folder, run


def test_saves_of_three_steps_without_waiting_while_the_optimizer_is_slow(tmp_path, whole):
    expected = []
    with one_thread(), inline() as session:  # the same, one step after another
        code = compile(SCRIPT.read_text(), str(SCRIPT), "exec")
        names: dict[str, Any] = {"__name__": "script"}
        exec(code, names)
        model, optimizer, scheduler = names["build"]()
        torch.manual_seed(11)
        pipe = rp.RoundPipe(
            model, optimizer, loss_fn=nn.functional.cross_entropy, num_microbatches=4, seed=3, session=session
        )
        pipe.register_for_checkpointing(scheduler)
        for _ in range(3):
            pipe.forward_backward(torch.randn(8, 8), torch.randint(3, (8,)))
            pipe.step(max_grad_norm=1.0)
            scheduler.step()
            pipe.synchronize()
            expected.append(weights_of(Path(pipe.save_checkpoint(tmp_path, wait=True).result())))
        pipe.close()
    found = [weights_of(whole[0] / f"step-{step}") for step in (1, 2, 3)]
    assert found == expected
    assert len({str(state) for state in found}) == 3


def five_more_are_the_rest_of(folder: Path, run: dict[str, Any], **more: str) -> None:
    rest = script(folder, devices="cpu:1", SCRIPT_STEPS="5", SCRIPT_LOAD="1", SCRIPT_PLAN="layers", **more)
    assert rest["losses"] == run["losses"][5:]
    for name in ("step", "weights", "moments", "lr", "random"):
        assert rest[name] == run[name], name


def test_ten_steps_are_five_and_five_in_processes(whole):
    five_more_are_the_rest_of(*whole)


@pytest.mark.slow
def test_ten_asynchronous_steps_are_five_and_five_in_processes(tmp_path):
    five_more_are_the_rest_of(tmp_path, script(tmp_path, SCRIPT_ASYNC="1", **WHOLE), SCRIPT_ASYNC="1")


def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(tmp_path):
    whole = inline_result(SCRIPT, SCRIPT_FOLDER=str(tmp_path / "whole"), SCRIPT_STEPS="4")
    killed = script(tmp_path / "a", SCRIPT_STEPS="4", SCRIPT_SAVE="1,3", SCRIPT_KILL="3.wrote script.pt")
    assert killed["code"] != 0
    assert checkpoint_files.find_checkpoint(tmp_path / "a")[0].name == "step-1"
    rest = inline_result(SCRIPT, SCRIPT_FOLDER=str(tmp_path / "a"), SCRIPT_STEPS="3", SCRIPT_LOAD="1")
    assert rest["weights"] == whole["weights"]


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    folder = tmp_path / "shared"
    with writing_in(folder):
        with pytest.raises(rp.CheckpointError, match=r"another run is writing .* a folder of its own"):
            with writing_in(folder):
                pass
    with writing_in(folder):
        assert list_checkpoints(folder) == []
