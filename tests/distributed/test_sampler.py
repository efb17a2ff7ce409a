"""A sampler on real ranks refuses weights that differ from the published ones."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rillflow.errors import WeightError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.roles.publishing import lay_out
from rillflow.sharding.layout import generation_mesh
from rillflow.sharding.tensor import own
from rillflow.workers.collectives import Ranks
from rillflow.workers.config import MeshSizes

sys.path.insert(0, str(Path(__file__).parent))
from processes import together

NEW = NewModel(hidden=16, layers=1, heads=2, kv_heads=2, context=16, alphabet="0123456789+=")


def published_and_damaged(ranks: Ranks) -> list[str]:
    """Return the results of switching to generation before and after one number changes on the last rank."""
    model = load_model(ModelConfig(new=NEW), seed=0, device=torch.device("cpu"), base=Path())
    sizes = MeshSizes(tp=2)
    generate = generation_mesh(sizes.mesh, 1)
    share, sampler = lay_out(model, sizes=sizes, generate=generate, ranks=ranks)
    sampler.publish(1)
    said = []
    for damage in (0.0, 1e-6, 0.0):
        if ranks.rank == 1:
            held = own(share.parallel.parameters["model.layers.0.self_attn.q_proj.weight"])
            held.view(-1)[0] += damage
        try:
            sampler.turn_to_generation(lambda: None)
            said.append("generates")
            sampler.turn_to_training()
        except WeightError as error:
            said.append(error.what)
    return said


def test_weight_digest_refuses_what_differs_from_what_was_published() -> None:
    wrong = "model.layers.0.self_attn.q_proj.weight differs from what was published as version 1"
    assert together(2, published_and_damaged) == [["generates", wrong, wrong]] * 2
