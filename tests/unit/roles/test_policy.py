"""The policy: what it samples carries the version of the weights that sampled it."""

from __future__ import annotations

from pathlib import Path

import torch

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.roles.policy import Policy
from rillflow.roles.share import Share
from rillflow.rollout.config import RolloutConfig
from rillflow.train.config import TrainConfig

NEW = NewModel(hidden=16, layers=1, heads=2, context=16, alphabet="0123456789+=")


def test_sampled_tokens_carry_the_version_published_last() -> None:
    torch.set_num_threads(1)
    model = load_model(ModelConfig(new=NEW), seed=0, device=torch.device("cpu"), base=Path())
    rollout = RolloutConfig(max_tokens=3, max_rows=2)
    policy = Policy(Share.whole(model), train=TrainConfig(), rollout=rollout, seed=0, updates=1)
    prompts = Batch(
        ids=row_ids([RowId(0, 0, 0)]),
        fields={
            "tokens": Ragged.from_rows([model.tokenizer.encode("1+2=")]),
            "columns": Ragged.from_text(["{}"]),
        },
    )
    for published in (0, 1, 2):
        rows = policy.generate(prompts, samples=2)
        sampled = rows.ragged("loss_mask").values
        assert set(rows.ragged("versions").values[sampled].tolist()) == {published}
        assert policy.publish() == published + 1
