"""What takes long says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import rpruntime as rp
from rpruntime import observer, terminal
from rpruntime.client import client_of


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for module in (terminal, observer):
        monkeypatch.setattr(module, "SAY_INTERVAL_S", 0.001)
        monkeypatch.setattr(module, "say", found.append)
    return found


def test_a_block_that_takes_long(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = threading.Event()
    monkeypatch.setattr(terminal, "say", lambda line: (lines.append(line), said.set()))
    with terminal.saying("digging", quiet=False):
        assert said.wait(30)
    assert lines[0] == "rpruntime: digging ... 0 s"
    assert not any(thread.name == "rpruntime-saying" for thread in threading.enumerate())
    count = len(lines)
    with pytest.raises(KeyError):
        with terminal.saying("digging", quiet=False):
            raise KeyError
    lines.clear()
    with terminal.saying("digging", quiet=True):
        assert not any(thread.name == "rpruntime-saying" for thread in threading.enumerate())
    assert count and not lines


def test_where_no_thread_can_be_started(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with terminal.saying("digging", quiet=False):
        pass


def test_the_first_step(session: Any, lines: list[str]) -> None:
    session.config["quiet"] = False
    found = client_of(session).observer
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rp.RoundPipe(
        model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2, plan="layers", session=session
    ) as pipe:
        found._say_first_steps()
        lines.clear()
        session.paused = True
        with pytest.raises(rp.RoundPipeError, match="nothing is left to do"):
            pipe.forward_backward(torch.ones(4, 2), torch.zeros(4, 2)).item()
        (first,) = found._first.values()
        first.told_s -= 1
        found._say_first_steps()
        session.paused = False
        assert lines == ["rpruntime: the first step ... 0 of 3 stages, 0 s"]
        pipe.step().result()
        assert not found._first, "from now on the script sees its steps"
        pipe.forward_backward(torch.ones(4, 2), torch.zeros(4, 2))
        found._say_first_steps()
        assert len(lines) == 1
