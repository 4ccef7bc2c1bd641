"""What the driver says of the GPUs, where pynvml is installed; else nothing."""

from __future__ import annotations

from typing import Any


class GpuUse:
    """Finds each GPU by the process that computes on it: numbers of devices differ between programs."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except Exception:  # not installed, or no driver
            return

    def of(self, pid: int) -> dict[str, float] | None:
        """`utilisation` (0 to 1) and `used_bytes` of the GPU that this process is on; None: nobody can tell."""
        if self._nvml is None:
            return None
        nvml = self._nvml
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if any(process.pid == pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)):
                    rates, memory = nvml.nvmlDeviceGetUtilizationRates(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
                    return {"utilisation": rates.gpu / 100, "used_bytes": float(memory.used)}
        except nvml.NVMLError:
            return None
        return None
