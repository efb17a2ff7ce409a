"""Write slices from all ranks at once, as a checkpoint does during training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rillflow.models.model_files import write_tensors
from rillflow.sharding.layout import Layout, Weights
from rillflow.sharding.sharded_file import WRITE, own_slices, together, write_list
from rillflow.workers.collectives import Ranks


def save_sharded(
    folder: Path, weights: Weights, layout: Layout, tensors: Mapping[str, Tensor], ranks: Ranks
) -> None:
    """Write a folder of slices for ``load_sharded``; every rank calls it."""

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        mine = own_slices(weights, layout, tensors, ranks)
        return json.dumps({name: write_tensors(folder / name, held) for name, held in mine.items()})

    def listed() -> str:
        if ranks.rank == 0:
            files = {name: each for one in written for name, each in json.loads(one).items()}
            write_list(folder, weights, layout, ranks.size, files)
        return ""

    written = together(ranks, torch.device("cpu"), write, folder, WRITE)
    together(ranks, torch.device("cpu"), listed, folder, WRITE)
