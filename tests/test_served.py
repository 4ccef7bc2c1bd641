"""Sessions without a script (`rpctl serve`): scripts come and go, die and are followed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

import rpruntime as rp
import rpruntime.client
from launcher.succession import STUCK_S, Holder, Succession
from rpruntime import served as places
from rpruntime.client_models import Models
from rpruntime.errors import SessionLost
from rpruntime.looking import look_at
from rpruntime.status import Status
from rpruntime.store.segments import SOCKET_NAME
from rpruntime.wire.codec import encode
from rpruntime.wire.mailbox import OBSERVER, Mailbox, new_keys
from rpruntime.wire.messages import FreeMsg, RoleDiedMsg
from rpruntime.wire.succession import ControllerGoneMsg, ModelsMsg, ResetMsg
from rpruntime.worker.failures import describe
from tests.launching import FAKE_CHILD, ROOT
from tests.leaks import Watch, no_leaks, open_descriptors, wait_until
from tests.reference import one_thread

RPCTL = [sys.executable, "-m", "launcher.rpctl"]


class Served:
    """A served session and what runs on it. `fake`: its processes are fakes, which have no torch to load."""

    def __init__(self, watch: Watch, name: str, *flags: str, fake: bool = False) -> None:
        self.watch, self.name = watch, f"{name}-{os.getpid()}"  # tests may run twice at a time
        self._more = {"RPRUNTIME_CHILD_COMMAND": FAKE_CHILD} if fake else {}
        done = self.rpctl("serve", "--detach", "--devices", "cpu:2", "--name", self.name, *flags)
        assert done.returncode == 0 and done.stdout == f"{self.name}\n", done
        self.folder = Path(f"/tmp/rpruntime-{os.getuid()}") / self.name
        watch.folders.add(self.folder)
        watch.launchers.add(json.loads((self.folder / "session.json").read_text())["launcher"]["pid"])

    def environ(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RPRUNTIME_")}
        return {**kept, "PYTHONPATH": str(ROOT), **self.watch.environ, **self._more}

    def rpctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*RPCTL, *words], env=self.environ(), cwd=ROOT, capture_output=True, text=True, timeout=90
        )

    def status(self) -> dict[str, Any]:
        (row,) = json.loads(self.rpctl("status", self.name, "--json").stdout)
        found: dict[str, Any] = row
        return found

    def start(self, script: str) -> subprocess.Popen[str]:
        code = f"SESSION = {self.name!r}\n{script}"
        return subprocess.Popen(
            [sys.executable, "-c", code], env=self.environ(), cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, script: str) -> str:
        process = self.start(script)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        if (self.folder / "session.json").exists():
            done = self.rpctl("stop", self.name)
            assert done.returncode == 0, done


HOLD = """
import rpruntime as rp, rpruntime.session
session = rp.init(name=SESSION)
session.wait_ready()
print(session.incarnation, flush=True)
input()
"""


def test_one_controller_at_a_time_and_a_dead_ones_place_is_free(tmp_path: Path) -> None:
    with no_leaks() as watch:
        with Served(watch, "served-places", fake=True) as served:
            row = served.status()
            assert row["served"] and row["controller"] is None and row["models"] == []
            assert {role["state"] for role in row["roles"]} == {"ready"}
            pids = {role["pid"] for role in row["roles"]}
            first = served.start(HOLD)
            assert first.stdout is not None
            assert first.stdout.readline() == "1\n"
            controller = served.status()["controller"]
            assert controller["pid"] == first.pid and "-c" in controller["argv"]
            second = served.start(HOLD)
            _, err = second.communicate(timeout=60)
            assert second.returncode == 1
            assert f"is used by process {first.pid} (" in err and "since" in err
            first.send_signal(signal.SIGKILL)
            first.communicate(timeout=20)
            third = served.start(HOLD)
            assert third.stdout is not None
            assert third.stdout.readline() == "2\n"
            third.communicate("\n", timeout=60)
            assert third.returncode == 0
            wait_until(lambda: served.status()["controller"] is None, 20.0, "the place is free")
            assert {role["pid"] for role in served.status()["roles"]} == pids
            conflict = served.start('import rpruntime as rp\nrp.init("cpu:3", name=SESSION)')
            _, err = conflict.communicate(timeout=60)
            assert f"conflicts with session {served.name}, which was served with devices 'cpu:2'" in err
        assert not served.folder.exists() or not (served.folder / "session.json").exists()


def test_a_session_that_is_stopped_tells_its_script_why() -> None:
    with no_leaks() as watch, Served(watch, "served-stopped", fake=True) as served:
        holder = served.start(
            "import rpruntime as rp\nclient = rp.Client.attach(SESSION)\nclient.wait_roles()\n"
            "print(client.models, flush=True)\ninput()\nclient.check_alive()"
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == f"<models of {served.name}: none>\n"
        assert served.rpctl("stop", served.name).returncode == 0
        _, err = holder.communicate("\n", timeout=60)
        assert holder.returncode == 1
        assert f"SessionLost: session {served.name} was ended: its launcher was told to end it (rpctl stop," in err


def test_a_served_session_ends_with_its_optimizer() -> None:
    with no_leaks() as watch, Served(watch, "served-lost", fake=True) as served:
        log_file = Path(json.loads((served.folder / "session.json").read_text())["config"]["log_dir"]) / "launcher.log"
        (pid,) = (row["pid"] for row in served.status()["roles"] if row["role"] == "optimizer")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not (served.folder / "session.json").exists(), 20.0, "its end")
        assert "rpruntime: the session ends: its optimizer is gone" in log_file.read_text()


def test_serve_in_the_foreground_ends_with_an_interrupt() -> None:
    with no_leaks() as watch:
        name = f"served-front-{os.getpid()}"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("RPRUNTIME_")}
        process = subprocess.Popen(
            [*RPCTL, "serve", "--devices", "cpu:1", "--name", name, "-q"],
            env={**environ, "PYTHONPATH": str(ROOT), "RPRUNTIME_CHILD_COMMAND": FAKE_CHILD, **watch.environ}, cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        watch.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{name}\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err


def test_serve_says_what_it_cannot_do() -> None:
    for words, sentence in (
        (["serve", "train.py"], "serve takes no script, but 'train.py' was given"),
        (["serve", "--detach", "--devices", "inline"], "they cannot be served"),
        (["serve", "--nonsense"], "--nonsense"),
    ):
        done = subprocess.run([*RPCTL, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and sentence in done.stderr, done


# --- models that go from one program to the next

MODEL = """
import torch, rpruntime as rp
torch.set_num_threads(1)
def loss_fn(outputs, labels):
    return (outputs - labels).pow(2).mean()
def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.zeros(8, 2)
def show(pipe):
    pipe.synchronize()
    for name, value in sorted(pipe.model.state_dict().items()):
        print(name, value.double().sum().item())
    print(pipe.step_count, pipe.user_state, pipe.optimizer.param_groups[0]["lr"], flush=True)
def make(asynchronous=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return rp.RoundPipe(
        model, optimizer, loss_fn=loss_fn, num_microbatches=2, plan="layers", seed=7, asynchronous=asynchronous
    )
"""

BEGIN = (
    MODEL
    + """
rp.init(name=SESSION)
pipe = make()
for number in range(3):
    pipe.forward_backward(*batch(number))
    pipe.step()
pipe.optimizer.param_groups[0]["lr"] = 0.005
pipe.user_state = {"epoch": 4}
pipe.forward_backward(*batch(3))
"""
)

GO_ON = (
    MODEL
    + """
pipe = rp.RoundPipe.attach(SESSION)
print(len(pipe.gradients()))
info = None
pipe.forward_backward(*batch(4))
info = pipe.step()
print(info.result().loss, info.result().lr)
show(pipe)
pipe.close()
"""
)

AT_ONCE = (
    MODEL
    + """
pipe = make()
for number in range(3):
    pipe.forward_backward(*batch(number))
    pipe.step()
pipe.optimizer.param_groups[0]["lr"] = 0.005
pipe.user_state = {"epoch": 4}
pipe.forward_backward(*batch(3))
print(len(pipe.gradients()))
pipe.forward_backward(*batch(4))
info = pipe.step()
print(info.result().loss, info.result().lr)
show(pipe)
"""
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """A session for several tests, of which each begins and ends without a model."""
    with no_leaks(descriptors=False) as watch, Served(watch, "served-shared", "-q") as served:
        yield served


def inline(script: str) -> str:
    """What a script prints in this process, with an inline session."""
    with one_thread(), rp.init("inline", quiet=True), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(script, {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.timeout(600)
def test_a_model_goes_on_in_another_program_with_its_open_gradients(shared: Served) -> None:
    assert shared.status()["models"] == []
    shared.run(BEGIN)
    (row,) = shared.status()["models"]
    assert row == {"name": "default", "version": 3, "step": 3, "num_calls": 1}
    watcher = f"import rpruntime as rp\nw = rp.Client.attach({shared.name!r}, observe=True)\n"
    look = watcher + "print(w.models['default']['step'], w.status()['controller'])"
    assert shared.run(look) == "3 None\n"
    going_on = shared.run(GO_ON)
    assert going_on == inline(AT_ONCE)
    assert "{'epoch': 4} 0.005" in going_on


KILLED = (
    MODEL
    + """
import os, signal
rp.init(name=SESSION)
pipe = make()
for number in range(3):
    pipe.forward_backward(*batch(number))
    pipe.step()
pipe.user_state = {"epoch": 1}
pipe.forward_backward(*batch(99))
os.kill(os.getpid(), signal.SIGKILL)
"""
)

FOLLOWS = (
    MODEL
    + """
client = rp.Client.attach(SESSION)
print(sorted(client.models))
pipe = rp.RoundPipe.attach(SESSION)
assert pipe.gradients() == {}
pipe.forward_backward(*batch(pipe.step_count))
pipe.step()
show(pipe)
pipe.close()
"""
)

UNDISTURBED = (
    MODEL
    + """
pipe = make()
pipe.user_state = {"epoch": 1}
for number in range(STEPS):
    pipe.forward_backward(*batch(number))
    pipe.step()
show(pipe)
"""
)


KILLED_AT_LOAD = (
    MODEL
    + """
import os, signal
from rpruntime.loading import Loader
Loader._write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
rp.init(name=SESSION)
make()
"""
)


@pytest.mark.timeout(600)
def test_a_killed_controller_loses_what_no_step_has_taken(shared: Served) -> None:
    """And one that is killed while its model is loading leaves nothing at all."""
    loading = shared.start(KILLED_AT_LOAD)
    _, err = loading.communicate(timeout=120)
    assert loading.returncode == -signal.SIGKILL, err
    wait_until(lambda: shared.status()["controller"] is None, 20.0, "the place is free")
    assert shared.status()["models"] == []
    dying = shared.start(KILLED)
    _, err = dying.communicate(timeout=120)
    assert dying.returncode == -signal.SIGKILL, err
    found = shared.run(FOLLOWS)
    steps = int(found.splitlines()[-1].split()[0])
    assert 2 <= steps <= 4  # the last message of a killed process may not have left it
    assert found.splitlines()[0] == "['default']"
    expected = inline(f"STEPS = {steps}\n{UNDISTURBED}")
    assert found.splitlines()[1:] == expected.splitlines()


SLOW_STEPS = (
    MODEL
    + """
import os, signal, time
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        if os.path.exists(FOLDER + "/go"):
            open(FOLDER + "/stepping", "w").close()
            time.sleep(SECONDS)
        return super().step(closure)
rp.init(name=SESSION)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh())
pipe = rp.RoundPipe(model, Slow(model.parameters(), lr=0.1), loss_fn=loss_fn, num_microbatches=2, plan="layers")
open(FOLDER + "/go", "w").close()
for number in range(2):
    pipe.forward_backward(*batch(number))
    pipe.step()
while not os.path.exists(FOLDER + "/stepping"):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.timeout(300)
def test_a_sealed_step_finishes_that_waits_for_a_long_one(shared: Served, tmp_path: Path) -> None:
    """The workers have nothing to do for longer than `STUCK_S`, as the weights that they need come from that one."""
    assert shared.status()["models"] == []
    dying = shared.start(f"FOLDER, SECONDS = {str(tmp_path)!r}, {STUCK_S + 1.5}\n{SLOW_STEPS}")
    _, err = dying.communicate(timeout=120)
    assert dying.returncode == -signal.SIGKILL, err
    look = (
        "import rpruntime as rp\nclient = rp.Client.attach(SESSION, timeout_s=60)\nmodel = client.models['default']\n"
    )
    assert shared.run(look + "print(model.step_count)\nmodel.close()") == "2\n"


# --- the succession, pure


def held(clock: list[float]) -> Succession:
    succession = Succession(clock=lambda: clock[0])
    succession.attach(Holder(3, 100, 1, ("python",), 0.0))
    return succession


def test_a_successor_waits_for_every_answer() -> None:
    succession = held([0.0])
    assert succession.leave().incarnation == 3 and succession.floor == 4 and succession.phase == "settling"
    succession.begin_reset(["optimizer", "worker-0", "worker-1"], {"worker-0": 1, "worker-1": 2}, [])
    assert not succession.answered("worker-1") and not succession.is_optimizers_turn()
    assert not succession.answered("worker-0") and succession.is_optimizers_turn()
    assert not succession.is_optimizers_turn(), "it has been told"
    assert succession.answered("optimizer") and succession.phase == "clean"
    succession.attach(Holder(4, 101, 1, ("python",), 0.0))


def test_workers_that_do_not_answer_are_overdue_and_the_optimizer_is_not() -> None:
    clock = [0.0]
    succession = held(clock)
    succession.leave()
    succession.begin_reset(["optimizer", "worker-0"], {"worker-0": 1}, [])
    assert succession.overdue() == []
    clock[0] = 1000.0
    assert succession.overdue() == ["worker-0"]
    assert not succession.answered("worker-0")
    assert succession.answered("optimizer")


@pytest.mark.parametrize("busy", [False, True])
def test_a_sealed_step_is_given_up_when_all_workers_stand_still(busy: bool) -> None:
    clock = [0.0]
    succession = held(clock)
    succession.leave()
    assert not succession.is_stuck([Status(1, busy, 5)])
    clock[0] = STUCK_S
    assert succession.is_stuck([Status(1, busy, 5)]) == (not busy)
    assert not succession.is_stuck([Status(1, busy, 6)]), "it moved"


# --- mail of controllers that are gone


class _Waiting:
    """An inbox in which these messages are, in this order."""

    def __init__(self, *mail: tuple[str, Any]) -> None:
        self.frames = [[b"", sender.encode(), *encode(msg)] for sender, msg in mail]

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.frames:
            raise zmq.Again
        return self.frames.pop(0)


def test_what_a_controller_has_sent_counts_though_the_news_of_its_end_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Mailbox(tmp_path, "optimizer", 1, new_keys())
    gone, last = ControllerGoneMsg(1), FreeMsg(())
    with monkeypatch.context() as patch:
        patch.setattr(box, "_inbox", _Waiting(("launcher.1", gone), ("controller.1", last)))
        assert [box.receive(), box.wait(0), box.receive()] == [[last], True, [gone]]
        patch.setattr(box, "_inbox", _Waiting(("controller.1", last), ("controller.2", last)))
        assert box.receive() == [last], "of the next one only"
        gone = ControllerGoneMsg(2)
        mail = ("launcher.1", gone), ("launcher.1", ResetMsg(3, {})), ("controller.2", last)
        patch.setattr(box, "_inbox", _Waiting(*mail))
        assert box.receive() == [gone, ResetMsg(3, {})], "a launcher's messages keep their order"
    box.close()


def test_news_of_a_death_come_when_what_came_before_has_been_dealt_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent until then is for the process that has died, not for the one after it."""
    box = Mailbox(tmp_path, "controller", 1, new_keys())
    last, gone, late = FreeMsg(()), ControllerGoneMsg(7), FreeMsg(())
    died = RoleDiedMsg("worker-0", 1, 77, "killed", True, (), "", 0, 1)
    mail = [
        ("optimizer.1", last),
        ("launcher.1", gone),
        ("launcher.1", died),
        ("worker-0.1", late),
        ("optimizer.1", last),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(box, "_inbox", _Waiting(*mail))
        assert box.receive() == [last] and box._incarnations.get("worker-0", 1) == 1
        assert box.wait(0) and box.receive() == [died, last] and box._incarnations["worker-0"] == 2
        assert box.wait(0) and box.receive() == [gone]
        patch.setattr(box, "_inbox", _Waiting(("launcher.1", gone), ("launcher.1", died)))
        assert [box.receive(), box.wait(0), box.receive()] == [[died], True, [gone]]
    box.close()


def test_an_observer_is_answered_and_leaves_nothing_in_who_answers(tmp_path: Path) -> None:
    keys = new_keys()
    box = Mailbox(tmp_path, "optimizer", 1, keys)
    before = open_descriptors()
    for number in range(20):
        observer = Mailbox(tmp_path, f"{OBSERVER}{number}", 1, keys)
        box.send(observer.role, ModelsMsg(()))
        assert observer.receive(10.0) == [ModelsMsg(())]
        observer.close()
    wait_until(lambda: open_descriptors() <= before, 10.0, "its sockets are closed")
    box.close()


def test_models_are_looked_for_again_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        tries = 0

        def __init__(self, session: Any) -> None:
            pass

        def find_models(self) -> None:
            self.tries += 1
            if self.tries == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(rpruntime.client, "Client", Interrupted)
    session = SimpleNamespace(incarnation=2)
    with pytest.raises(KeyboardInterrupt):
        rpruntime.client.client_of(session)
    found = rpruntime.client.client_of(session)
    assert found.tries == 2 and found is session.client


def test_models_that_the_optimizer_cannot_tell_are_an_error_and_asked_for_again() -> None:
    class Asking:
        """A client that hears of a failure, then of no models."""

        def __init__(self) -> None:
            refusal = describe(rp.HostMemoryError("no room to tell"))
            self.answers = [ModelsMsg((), refusal), ModelsMsg(())]

        def wait_roles(self) -> None:
            pass

        def send(self, role: str, msg: Any) -> None:
            models.on_answer(self.answers.pop(0))

        def wait(self, ready: Any, what: str) -> None:
            assert ready()

    client: Any = Asking()
    models = Models(client)
    with pytest.raises(rp.HostMemoryError, match="no room to tell"):
        models.find()
    models.find()
    assert list(models) == []


def test_looking_at_a_session_whose_launcher_is_stopped_ends_in_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / SOCKET_NAME))
        silent.listen()
        with pytest.raises(SessionLost, match="timed out"):
            look_at(tmp_path, {"keys": new_keys(), "token": "x"}, timeout_s=0.2)


def test_controllers_are_counted_on_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError("no space")

    monkeypatch.setattr(places, "command", lambda: ["a long command line"] * 10)
    first = places.take_place(tmp_path)
    first.leave()
    with monkeypatch.context() as patch:
        patch.setattr(places.os, "pwrite", full)
        with pytest.raises(OSError, match="no space"):
            places.take_place(tmp_path)
    monkeypatch.setattr(places, "command", lambda: ["short"])
    numbers = []
    for _ in range(2):
        place = places.take_place(tmp_path)
        numbers.append(place.incarnation)
        place.leave()
    assert first.incarnation == 1 and numbers == [2, 3]
