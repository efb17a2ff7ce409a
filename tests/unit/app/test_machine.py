"""The memory, cores and CUDA devices of this machine."""

from __future__ import annotations

import os

import torch

from rillflow.app.machine import available_memory, cuda_devices
from rillflow.runs.environment import usable_cores


def test_cuda_devices_are_counted_as_torch_counts_them() -> None:
    assert cuda_devices() == torch.cuda.device_count()


def test_cores_and_memory_are_those_of_this_process() -> None:
    assert 0 < usable_cores() <= (os.cpu_count() or 1)
    memory = available_memory()
    assert memory is not None
    assert memory > 0
