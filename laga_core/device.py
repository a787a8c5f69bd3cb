"""One adapter for CPU, CUDA and Ascend NPU, on top of ``torch.accelerator``.

``torch_npu`` is imported only when an NPU is asked for: without Ascend's CANN runtime it cannot even be loaded.
"""

from __future__ import annotations

import importlib

import torch

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def resolve_device(name: str | torch.device | None = None) -> torch.device:
    """The device to use: ``name``, or the accelerator of this machine, or the CPU.

    Raises ``ValueError`` for an unknown kind and ``RuntimeError`` where the named accelerator cannot be used.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    kind = str(name).split(":")[0]
    if kind not in _BACKENDS:
        raise ValueError(f"unknown device {str(name)!r}; known: {', '.join(_BACKENDS)}")
    if kind == "npu":
        _load_npu()
    device = torch.device(name)
    if kind != "cpu" and (
        not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type != kind  # type: ignore[union-attr]
    ):
        raise RuntimeError(f"no usable {kind} device on this machine; check its driver, or use device='cpu'")
    return device


def _load_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise RuntimeError(
            f"device 'npu' needs torch_npu and Ascend's CANN runtime (pip install -r requirements-npu.txt): {error}"
        ) from error


def backend_for(device: torch.device) -> str:
    """The collective library of a device: gloo, nccl or hccl."""
    return _BACKENDS[device.type]


def device_count(device: torch.device) -> int | None:
    """How many ranks this machine can carry on ``device``; ``None`` where nothing limits them (CPU)."""
    return None if device.type == "cpu" else torch.accelerator.device_count()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued; nothing on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak-memory measurement; nothing on the CPU, whose allocator keeps no such count."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most bytes the caching allocator had given out since the last reset; ``None`` on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.max_memory_allocated()


def describe(device: torch.device) -> str:
    """The hardware in words, for a record's provenance."""
    if device.type == "cpu":
        return _cpu_name()
    module = getattr(torch, device.type)
    return str(module.get_device_name(device.index or 0))


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()
