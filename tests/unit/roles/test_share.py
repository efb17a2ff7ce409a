"""Shards of models on one rank: memory that two of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rillflow.models.adapters import is_adapter
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, ScalarModel, load_model, outline, save_model
from rillflow.roles.model_shard import ModelShard
from rillflow.workers.collectives import SingleRank
from rillflow.workers.config import MeshSizes

CPU = torch.device("cpu")


@pytest.mark.parametrize(("is_alike", "kept"), [(True, "full"), (True, "int8"), (False, "full")])
def test_a_critic_beside_a_policy_has_its_base_and_an_adapter_and_head_of_its_own(
    tmp_path: Path, is_alike: bool, kept: Literal["full", "int8"]
) -> None:
    def read(kind: type, name: str, beside: ModelShard | None = None) -> ModelShard:
        config = ModelConfig(path=str(tmp_path / name), adapter=AdapterConfig(rank=2, base=kept))
        model = outline(kind, config, seed=1, device=CPU, base=Path(), section="x")
        return ModelShard.of(model, MeshSizes(), SingleRank(), beside=beside)

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


@pytest.mark.parametrize(("kept", "is_shared"), [("full", False), ("int8", True)])
def test_a_reference_is_the_policys_module_where_both_bases_are_kept_alike(
    tmp_path: Path, kept: Literal["full", "int8"], is_shared: bool
) -> None:
    """The policy names no targets; the directory of the reference names all of them."""
    made = load_model(ModelConfig(new=NewModel(hidden=32, layers=2)), seed=0, device=CPU, base=Path())
    save_model(made, tmp_path / "base")
    how: dict[str, Any] = {"seed": 1, "device": CPU, "base": Path()}
    trained: ModelShard[LanguageModel] | None = None
    for name, base in (("policy", "int8"), ("before", kept)):
        config = ModelConfig.model_validate(
            {"path": str(tmp_path / "base"), "adapter": {"rank": 2, "base": base}}
        )
        model = load_model(config, **how)
        save_model(model, tmp_path / name)
        trained = trained or ModelShard.whole(model)
    before = outline(LanguageModel, ModelConfig(path=str(tmp_path / "before")), section="x", **how)
    assert trained is not None and trained.has_base_of(before, MeshSizes()) is is_shared
