"""Shares of models on one rank: what two of them have together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rillflow.cluster.config import MeshSizes
from rillflow.cluster.ranks import SingleRank
from rillflow.models.adapters import is_adapter
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, ScalarModel, load_model, outline, save_model
from rillflow.roles.share import Share

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_critic_beside_a_policy_has_its_base_and_an_adapter_and_head_of_its_own(
    tmp_path: Path, is_alike: bool
) -> None:
    def read(kind: type, name: str, beside: Share | None = None) -> Share:
        config = ModelConfig(path=str(tmp_path / name), adapter=AdapterConfig(rank=2))
        model = outline(kind, config, seed=1, device=CPU, base=Path(), section="x")
        return Share.of(model, MeshSizes(), SingleRank(), beside=beside)

    for seed, name in enumerate(("base", "other")):
        made = load_model(ModelConfig(new=NewModel(hidden=32, layers=2)), seed=seed, device=CPU, base=Path())
        save_model(made, tmp_path / name)
    policy = read(LanguageModel, "base")
    critic = read(ScalarModel, "base" if is_alike else "other", policy)
    own = {name: each.data_ptr() for name, each in critic.parallel.parameters.items()}
    together = {name for name, each in policy.parallel.parameters.items() if own.get(name) == each.data_ptr()}
    frozen = {name for name in own if not is_adapter(name) and name != "score.weight"}
    assert together == (frozen if is_alike else set())
    alone = read(ScalarModel, "base" if is_alike else "other")
    for name, each in alone.parallel.parameters.items():
        assert torch.equal(each, critic.parallel.parameters[name])
