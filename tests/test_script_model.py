"""The script's model while a pipe is open: older weights are not taken for new ones, changes are not passed over."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpruntime as rp
from rpruntime import ConfigError
from tests.reference import PausedSession
from tests.tiny_models import batch, tiny

pytestmark = pytest.mark.usefixtures("single_thread")

mse = nn.functional.mse_loss
STALE = r"older weights.*call pipe\.synchronize\(\)"


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.randn(4, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@pytest.fixture
def lora() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="peft")
        warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, to peft
        yield pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"])


# --- older weights


READS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: model(torch.randn(4, 4)),
    "state_dict": lambda model: model.state_dict(),
    "deepcopy": copy.deepcopy,
    "save": lambda model: torch.save(model, io.BytesIO()),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("read", READS)
def test_reading_older_weights_is_said_once_in_the_scripts_line(
    session: PausedSession, read: str, asynchronous: bool
) -> None:
    model = small()
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, asynchronous=asynchronous, session=session) as pipe:
        READS[read](model)  # nothing has been stepped
        pipe.forward_backward(*data())
        READS[read](model)
        pipe.step()
        pipe.synchronize()
        READS[read](model)
        pipe.forward_backward(*data())
        pipe.step()
        with pytest.warns(UserWarning, match=STALE) as caught:
            READS[read](model)
        assert caught[0].filename == __file__
        READS[read](model)
        pipe.evaluate([data()])
        pipe.load_state_dict(copy.deepcopy(pipe._model.state_dict()))
    READS[read](model)
    assert not model._forward_pre_hooks and not model._state_dict_pre_hooks


def test_nothing_of_a_pipe_stays_in_a_copy(session: PausedSession) -> None:
    model = small()
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, session=session) as pipe:
        copied = pickle.loads(pickle.dumps(model))
        pipe.forward_backward(*data())
        pipe.step()
        copied(torch.randn(4, 4))
        with rp.RoundPipe(copied, sgd(copied), loss_fn=mse, name="copy", session=session) as other:
            other.forward_backward(*data())


def test_a_second_pipe_of_an_open_ones_model(session: PausedSession) -> None:
    model = small()
    rp.RoundPipe(model, sgd(model), loss_fn=mse, session=session)
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, session=session) as pipe:
        pipe.forward_backward(*data())
        pipe.step()
        with pytest.warns(UserWarning, match=STALE):
            model.state_dict()
    assert not model._forward_pre_hooks


def test_models_of_transformers_too(session: PausedSession, lora: Any, tmp_path: Path) -> None:
    import peft

    model = tiny("llama")
    adapted = peft.get_peft_model(model, lora)
    ids = {"input_ids": batch()["input_ids"]}
    reads = [
        lambda: adapted(**ids),
        lambda: model(**ids),
        lambda: adapted.generate(**ids, max_new_tokens=1, do_sample=False),
        lambda: adapted.save_pretrained(tmp_path / "adapters"),
        lambda: model.save_pretrained(tmp_path / "all"),
    ]
    for read in reads:
        with rp.RoundPipe(adapted, sgd(adapted), num_microbatches=2, session=session) as pipe:
            pipe.forward_backward(batch())
            pipe.step()
            pipe.generate(batch()["input_ids"], max_new_tokens=1)
            pipe.save_pretrained(tmp_path / "ours")
            pipe.forward_backward(batch())
            pipe.step()
            with pytest.warns(UserWarning, match=STALE):
                read()


# --- changes


def replaced_layer(model: nn.Module) -> None:
    model[0] = nn.Linear(4, 4)  # type: ignore[operator]


def inner_layer(model: nn.Module) -> None:
    model[1] = nn.Sequential(model[1], nn.Dropout())  # type: ignore[index, operator]


def replaced_parameter(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(torch.zeros(1))  # type: ignore[index, union-attr]


def frozen(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]


def moved(model: nn.Module) -> None:
    model.half()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            replaced_layer,
            r"^0 was replaced after RoundPipe wrapped the model \(a Linear then, a Linear now\).*make the",
        ),
        (inner_layer, r"^1 was replaced .*a Dropout then, a Sequential now"),
        (replaced_parameter, r"^2\.bias was replaced .*a Parameter then, a Parameter now"),
        (lambda model: model.append(nn.Linear(1, 1)), "^the model has more or fewer parts"),
        (lambda model: model[2].register_parameter("more", nn.Parameter(torch.ones(1))), "^2 has more or fewer parts"),
        (frozen, r"requires_grad of 0\.weight is False now and was True when .*make a new RoundPipe"),
        (moved, r"0\.weight was written to"),
    ],
)
def test_a_changed_model_is_not_trained_on(session: PausedSession, change: Any, message: str) -> None:
    model = small()
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, session=session) as pipe:
        pipe.forward_backward(*data())
        change(model)
        with pytest.raises(ConfigError, match=message):
            pipe.forward_backward(*data())
        pipe.step()  # what was asked for before
    with rp.RoundPipe(model, sgd(model), loss_fn=None, name="again", session=session):
        pass


def test_a_change_that_is_taken_back(session: PausedSession) -> None:
    model = small()
    last = model[2]
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, session=session) as pipe:
        model[2] = nn.Linear(4, 1)
        for call in (lambda: pipe.forward(data()[0]), lambda: pipe.evaluate([data()])):
            with pytest.raises(ConfigError, match="2 was replaced"):
                call()
        with pytest.raises(ConfigError, match="2 was replaced"):
            pipe.load_state_dict(model.state_dict())
        model[2] = last
        pipe.forward_backward(*data())
        pipe.step()


def test_thawing_what_the_optimizer_has(session: PausedSession) -> None:
    model = small()
    optimizer = sgd(model)
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    with rp.RoundPipe(model, optimizer, loss_fn=mse, session=session) as pipe:
        pipe.forward_backward(*data())
        pipe.step()
        model[0].bias.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"requires_grad of 0\.bias is True now and was False"):
            pipe.forward_backward(*data())
        assert pipe.evaluate([data()]).num_items == 4  # takes no gradient


def test_adapters_after_wrapping(session: PausedSession, lora: Any, tmp_path: Path) -> None:
    import peft

    model = tiny("llama")
    with rp.RoundPipe(model, sgd(model), num_microbatches=2, session=session) as pipe:
        peft.get_peft_model(model, lora)
        message = r"model\.layers\.0\.self_attn\.q_proj was replaced .*a Linear around it now\).*get_peft_model"
        with pytest.raises(ConfigError, match=message):
            pipe.forward_backward(batch())
        with pytest.raises(ConfigError, match=message):
            pipe.save_pretrained(tmp_path)


def test_adapters_that_are_merged_or_inside_a_plain_model(session: PausedSession, lora: Any, tmp_path: Path) -> None:
    import peft

    base = tiny("llama")
    model = peft.get_peft_model(base, lora)
    model.merge_adapter()
    with pytest.raises(ConfigError, match=r"q_proj are merged into its weights.*unmerge_adapter"):
        rp.RoundPipe(model, sgd(model), session=session)
    with rp.RoundPipe(model, num_microbatches=2, session=session) as looks:
        assert looks.evaluate([batch()]).loss > 0
    model.unmerge_adapter()
    with rp.RoundPipe(base, sgd(base), num_microbatches=2, session=session) as pipe:
        for merge in (False, True):
            with pytest.raises(ConfigError, match="give RoundPipe what get_peft_model returned"):
                pipe.save_pretrained(tmp_path / "out", merge_adapters=merge)


def test_adapters_that_are_switched(session: PausedSession, lora: Any, tmp_path: Path) -> None:
    import peft

    model = peft.get_peft_model(tiny("llama"), lora)
    model.add_adapter("other", lora)
    ids = batch()["input_ids"]
    with rp.RoundPipe(model, sgd(model), num_microbatches=2, session=session) as pipe:
        pipe.forward_backward(batch())
        with model.disable_adapter():
            with pytest.raises(ConfigError, match=r"q_proj were switched, merged or disabled"):
                pipe.forward({"input_ids": ids})
        model.set_adapter("other")
        with pytest.raises(ConfigError, match="were switched"):
            pipe.evaluate([batch()])
        model.set_adapter("default")
        model.merge_adapter()
        with pytest.raises(ConfigError, match="were switched"):
            pipe.save_pretrained(tmp_path, merge_adapters=True)
        model.unmerge_adapter()
        pipe.synchronize()
        pipe.forward_backward(batch())
        pipe.step()
