"""Machine: its main memory and CUDA devices, without importing torch."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from rillflow.runs.environment import CONTROL_GROUP, package_version, words_of

_CAPABILITY = (75, 76)
"""CUDA's numbers of the attributes with the major and minor compute capability."""
_AMPERE = (8, 0)


def cuda_devices() -> int | None:
    """Return how many CUDA devices torch will see, without importing it; None if only torch can tell."""
    version = package_version("torch") or ""
    if "+rocm" in version or sys.platform != "linux":
        return None
    if version.endswith("+cpu"):
        return 0
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return 0
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


def cuda_capability(device: str) -> tuple[int, int] | None:
    """Return the compute capability of the run's CUDA device; None if the run uses none.

    A device that this machine's driver does not show, such as one of other nodes, is taken for an Ampere.

    Args:
        device: the setting ``run.device``.
    """
    if not device.startswith("cuda") and not (device == "auto" and cuda_devices()):
        return None
    try:
        driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return _AMPERE
    driver.cuInit(0)
    driver.cuDeviceGet(ctypes.byref(handle), int(device.partition(":")[2] or 0))
    found = [ctypes.c_int(0), ctypes.c_int(0)]
    for value, attribute in zip(found, _CAPABILITY, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    return (found[0].value, found[1].value) if found[0].value else _AMPERE


def available_memory() -> int | None:
    """Return the bytes that this process may still take; None if the system does not report them."""
    free, limit = _main_memory("MemAvailable"), _memory_limit()
    used = words_of(CONTROL_GROUP / "memory.current")
    if free is not None and limit is not None and used:
        return min(free, limit - int(used[0]))
    return free


def machine_memory() -> int | None:
    """Return the bytes of main memory within a container's limit; None if the system does not report them."""
    there, limit = _main_memory("MemTotal"), _memory_limit()
    return min(there, limit) if there is not None and limit is not None else there


def _main_memory(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    entries = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(entries[name].split()[0]) * 1024


def _memory_limit() -> int | None:
    limit = words_of(CONTROL_GROUP / "memory.max")
    return int(limit[0]) if limit and limit[0].isdigit() else None


def device_memory(device: str) -> int | None:
    """Return the bytes of the run's CUDA device, without importing torch; None if the run uses none.

    Args:
        device: the setting ``run.device``; ``auto`` takes a CUDA device if there is one.
    """
    if device != "auto" and not device.startswith("cuda"):
        return None
    if not cuda_devices():
        return None
    driver, handle, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.c_size_t(0)
    number = int(device.partition(":")[2] or 0)
    found = driver.cuDeviceGet(ctypes.byref(handle), number) == 0
    return total.value if found and driver.cuDeviceTotalMem_v2(ctypes.byref(total), handle) == 0 else None
