"""The device list: what CUDA_VISIBLE_DEVICES leaves, in its order, one token a worker."""

from __future__ import annotations

import pytest

from launcher.devices import Device, Gpu, resolve_devices
from rpruntime.errors import ConfigError

A = Gpu("GPU-aaaa1111-0000", "NVIDIA RTX 4090", 24 << 30)
B = Gpu("GPU-bbbb2222-0000", "NVIDIA RTX 4090", 24 << 30)
SLICED = Gpu(
    "GPU-cccc3333-0000",
    "NVIDIA H200",
    140 << 30,
    (Gpu("MIG-dddd4444", "MIG 1g", 17 << 30), Gpu("MIG-eeee5555")),
)


def found(spec: str, visible: str | None, gpus: tuple[Gpu, ...] = (A, B), cores: int = 8) -> tuple[Device, ...]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return resolve_devices(spec, environ=environ, probe=lambda: gpus, cores=cores)


def tokens(spec: str, visible: str | None, gpus: tuple[Gpu, ...] = (A, B)) -> list[tuple[str, str]]:
    return [(device.name, device.token) for device in found(spec, visible, gpus)]


@pytest.mark.parametrize(
    "visible, expected",
    [
        (None, ["0", "1"]),
        ("0", ["0"]),
        ("1,0", ["1", "0"]),
        (" 1 , 0 ", ["1", "0"]),
        ("GPU-bbbb2222-0000", ["GPU-bbbb2222-0000"]),
        ("GPU-bbbb", ["GPU-bbbb"]),
        ("GPU-bbbb2222-0000,0", ["GPU-bbbb2222-0000", "0"]),
        ("1,-1,0", ["1"]),
    ],
)
def test_visible_order_and_tokens(visible: str | None, expected: list[str]) -> None:
    wanted = [(f"cuda:{index}", token) for index, token in enumerate(expected)]
    assert tokens("cuda", visible) == wanted
    assert tokens("auto", visible) == wanted


def test_mig_instances() -> None:
    assert tokens("cuda", "MIG-eeee5555", (SLICED,)) == [("cuda:0", "MIG-eeee5555")]
    assert tokens("cuda", None, (A, SLICED)) == [
        ("cuda:0", "0"),
        ("cuda:1", "MIG-dddd4444"),
        ("cuda:2", "MIG-eeee5555"),
    ]


@pytest.mark.parametrize(
    "visible, words",
    [
        ("0,0", "twice"),
        ("0,GPU-aaaa1111-0000", "twice"),
        ("9", "no GPU 9, this machine has GPUs 0 to 1"),
        ("GPU-ffff", "no device of this machine"),
        ("GPU-", "several"),
        ("MIG-dddd4444", "no device of this machine"),
        ("abc", "no index"),
        ("0,,1", "no index"),
    ],
)
def test_wrong_list_is_one_sentence(visible: str, words: str) -> None:
    for spec in ("auto", "cuda", "0"):
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES") as caught:
            found(spec, visible)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_hidden_gpus(visible: str) -> None:
    assert [device.name for device in found("auto", visible)] == ["cpu:0", "cpu:1"]
    with pytest.raises(ConfigError, match="leaves no CUDA device visible"):
        found("cuda", visible)


def test_no_gpu() -> None:
    assert [device.name for device in found("auto", None, (), cores=1)] == ["cpu:0"]
    assert [device.name for device in found("auto", "0", (), cores=16)] == ["cpu:0", "cpu:1"]
    with pytest.raises(ConfigError, match="no CUDA device was found"):
        found("cuda", None, ())
    with pytest.raises(ConfigError, match="has no GPU"):
        found("cuda", "0", ())


def test_chosen_indices_count_within_the_visible_ones() -> None:
    assert tokens("cuda:1,0", "1,0") == [("cuda:1", "0"), ("cuda:0", "1")]
    assert tokens("1", "GPU-bbbb,GPU-aaaa") == [("cuda:1", "GPU-aaaa")]
    assert tokens("cuda:0,cuda:1", None) == [("cuda:0", "0"), ("cuda:1", "1")]
    with pytest.raises(ConfigError, match="no cuda:2"):
        found("cuda:2", None)
    with pytest.raises(ConfigError, match="twice"):
        found("0,0", None)


def test_cpu_and_inline() -> None:
    assert found("inline", None) == ()
    assert [device.name for device in found("cpu:3", None)] == ["cpu:0", "cpu:1", "cpu:2"]
    assert len(found("cpu:64", None)) == 64
    assert all(device.token == "" for device in found("cpu:3", "0,1"))


@pytest.mark.parametrize("spec", ["cpu:0", "cpu:65", "cpu:x", "gpu", "cuda:", "cuda:a", "-1", "", "0,,1"])
def test_wrong_spec(spec: str) -> None:
    with pytest.raises(ConfigError, match="--devices"):
        found(spec, None)


def test_model_and_memory_are_known() -> None:
    device = found("cuda", "1")[0]
    assert (device.model, device.memory_bytes, device.is_cuda) == ("NVIDIA RTX 4090", 24 << 30, True)
