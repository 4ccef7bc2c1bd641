"""Which devices a run uses, found without torch and without a CUDA context (hundreds of MB of GPU 0 each).

Each worker sees exactly its one device: CUDA_VISIBLE_DEVICES is one token of the user's own list, kept as it
was given. `cuda:0,1` counts within what CUDA_VISIBLE_DEVICES leaves visible, as torch does.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rpruntime.errors import ConfigError

MAX_CPU_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG instance of one, as the driver names it. Memory in bytes; 0: unknown."""

    uuid: str
    name: str = ""
    memory_bytes: int = 0
    mig: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the session. `token` is its worker's CUDA_VISIBLE_DEVICES ("" for cpu devices)."""

    name: str
    token: str = ""
    model: str = ""
    memory_bytes: int = 0

    @property
    def is_cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.name.startswith("cuda")


Probe = Callable[[], tuple[Gpu, ...]]


def resolve_devices(
    spec: str,
    *,
    environ: Mapping[str, str] = os.environ,
    probe: Probe | None = None,
    cores: int | None = None,
) -> tuple[Device, ...]:
    """Devices named by `--devices`; () for "inline".

    Args:
        spec: auto, inline, cpu:N, cuda, cuda:0,1 or 0,1.
        environ: where CUDA_VISIBLE_DEVICES is read.
        probe: lists the machine's GPUs in the driver's order (injected by tests).
        cores: usable cores, for "auto" (default: this process's).

    Raises:
        ConfigError: there is no such device; the message says what is there.
    """
    probe = probe_gpus if probe is None else probe
    text = spec.strip().lower()
    if text == "inline":
        return ()
    if text == "cpu" or text.startswith("cpu:"):
        return _cpu_devices(text)
    if text == "auto":
        gpus = probe()
        visible = _visible(environ, gpus) if gpus else ()
        if visible:
            return visible
        cores = usable_cores() if cores is None else cores
        return tuple(Device(f"cpu:{index}") for index in range(min(2, max(1, cores))))
    if text == "cuda":
        return _some(_visible(environ, probe()), environ)
    if re.fullmatch(r"(cuda:)?\d+(,(cuda:)?\d+)*", text):
        return _chosen(text, _some(_visible(environ, probe()), environ))
    raise ConfigError(f"--devices {spec!r}: one of auto, inline, cpu:N, cuda, cuda:0,1 or 0,1 is needed")


def _cpu_devices(text: str) -> tuple[Device, ...]:
    number = text.partition(":")[2] or "1"
    if not number.isdigit() or not 1 <= int(number) <= MAX_CPU_DEVICES:
        raise ConfigError(f"--devices {text}: cpu:N with N from 1 to {MAX_CPU_DEVICES} is needed")
    return tuple(Device(f"cpu:{index}") for index in range(int(number)))


def _some(visible: tuple[Device, ...], environ: Mapping[str, str]) -> tuple[Device, ...]:
    if visible:
        return visible
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    if setting is not None:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={setting!r} leaves no CUDA device visible: unset it or use --devices cpu:2"
        )
    raise ConfigError("no CUDA device was found (does nvidia-smi list one?): use --devices cpu:2")


def _chosen(text: str, visible: tuple[Device, ...]) -> tuple[Device, ...]:
    indices = [int(word.removeprefix("cuda:")) for word in text.split(",")]
    if len(set(indices)) != len(indices):
        raise ConfigError(f"--devices {text}: a device is named twice")
    for index in indices:
        if index >= len(visible):
            raise ConfigError(
                f"--devices {text}: there is no cuda:{index}, visible are cuda:0 to cuda:{len(visible) - 1}"
            )
    return tuple(visible[index] for index in indices)


def _visible(environ: Mapping[str, str], gpus: tuple[Gpu, ...]) -> tuple[Device, ...]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in its order.

    CUDA itself silently ends the list at the first token it does not understand; here that is an error.
    """
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        found = [(gpu, str(index)) for index, gpu in enumerate(gpus) if not gpu.mig]
        # A GPU in MIG mode is reachable only through its instances, which only uuids name.
        found += [(instance, instance.uuid) for gpu in gpus for instance in gpu.mig]
    elif setting.strip() in ("", "-1"):
        return ()
    else:
        tokens = [token.strip() for token in setting.split(",")]
        if "-1" in tokens:  # the usual way to end the list early
            tokens = tokens[: tokens.index("-1")]
        found = [(_find(token, gpus, setting), token) for token in tokens]
        uuids = [gpu.uuid for gpu, _ in found]
        if len(set(uuids)) != len(uuids):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={setting!r} names a device twice: CUDA refuses that, name each once"
            )
    return tuple(Device(f"cuda:{index}", token, gpu.name, gpu.memory_bytes) for index, (gpu, token) in enumerate(found))


def _find(token: str, gpus: tuple[Gpu, ...], setting: str) -> Gpu:
    if token.isdigit():
        if int(token) < len(gpus):
            return gpus[int(token)]
        there = f"GPUs 0 to {len(gpus) - 1}" if gpus else "no GPU"
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={setting!r}: there is no GPU {token}, this machine has {there}")
    if token.startswith(("GPU-", "MIG-")):
        every = [one for gpu in gpus for one in (gpu, *gpu.mig)]
        # CUDA takes a unique beginning of a uuid too.
        matches = [one for one in every if one.uuid.lower().startswith(token.lower())]
        if len(matches) == 1:
            return matches[0]
        problem = "fits several devices" if matches else "is no device of this machine"
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={setting!r}: {token} {problem} (`nvidia-smi -L` lists them)")
    raise ConfigError(f"CUDA_VISIBLE_DEVICES={setting!r}: {token!r} is no index and no GPU- or MIG- uuid")


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def probe_gpus() -> tuple[Gpu, ...]:
    """The machine's GPUs, from libnvidia-ml, else from libcuda; () without a driver. Makes no context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return _probe_libcuda()
    if nvml.nvmlInit_v2() != 0:
        return _probe_libcuda()
    try:
        return _probe_nvml(nvml)
    finally:
        nvml.nvmlShutdown()


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _probe_nvml(nvml: ctypes.CDLL) -> tuple[Gpu, ...]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    gpus = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            gpus.append(_describe(nvml, handle, _mig_instances(nvml, handle)))
    return tuple(gpus)


def _describe(nvml: ctypes.CDLL, handle: ctypes.c_void_p, mig: tuple[Gpu, ...] = ()) -> Gpu:
    uuid, name, memory = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96), _NvmlMemory()
    nvml.nvmlDeviceGetUUID(handle, uuid, 96)
    nvml.nvmlDeviceGetName(handle, name, 96)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(uuid.value.decode(), name.value.decode(), int(memory.total), mig)


def _mig_instances(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> tuple[Gpu, ...]:
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    try:
        if nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending)) != 0 or not current.value:
            return ()
        if nvml.nvmlDeviceGetMaxMigDeviceCount(handle, ctypes.byref(most)) != 0:
            return ()
        found = []
        for index in range(most.value):
            instance = ctypes.c_void_p()
            if nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index, ctypes.byref(instance)) == 0:
                found.append(_describe(nvml, instance))
        return tuple(found)
    except AttributeError:  # a driver older than MIG
        return ()


def _probe_libcuda() -> tuple[Gpu, ...]:
    """Without libnvidia-ml (WSL, Jetson). Uuids are unknown: indices stand for them. Makes no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    # libcuda reads the variable once, at cuInit; here the whole machine is wanted.
    setting = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        failed = cuda.cuInit(0) != 0
    finally:
        if setting is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = setting
    count = ctypes.c_int()
    if failed or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    gpus = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(96)
        cuda.cuDeviceGetName(name, 96, index)
        gpus.append(Gpu(f"GPU-{index}", name.value.decode()))
    return tuple(gpus)
