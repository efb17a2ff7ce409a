"""Writing a plain model refuses a folder that exists, and a model without an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rillflow.errors import ModelError, RunDirectoryError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow_parts.adapters.merged import write_merged


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="already exists"):
        write_merged(tmp_path, tmp_path, "float32")


def test_a_whole_model_has_no_adapter_to_merge(tmp_path: Path) -> None:
    new = NewModel(hidden=16, layers=1, heads=2, kv_heads=1, context=16, alphabet="01")
    model = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
    save_model(model, tmp_path / "model")
    with pytest.raises(ModelError, match="holds a whole model"):
        write_merged(tmp_path / "model", tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()
