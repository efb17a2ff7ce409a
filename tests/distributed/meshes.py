"""Helpers for tests of training over a mesh: small decoders, rows, and one training run of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rillflow.formulas.config import (
    MOST_LOGITS,
    PolicyLossConfig,
    ValueLossConfig,
)
from rillflow.formulas.preferences import PairLossConfig
from rillflow.formulas.unpaired import UnpairedLossConfig
from rillflow.models.attention import ATTENTION, register
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.sharding.mesh import RankGroups, rank_groups
from rillflow.sharding.module import Parallel
from rillflow.training.answers import AnswerLoss
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss, ValueLoss
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import Ranks

NUM_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run over a mesh."""

    kind: str = "starcoder2"
    """Model type: Starcoder2 has biases and no float32 parts in float64; Qwen3 has norms of heads."""
    dp: int = 1
    pp: int = 1
    tp: int = 1
    fsdp: int = 1
    """Size of the groups of dp ranks that share one copy of the parameters."""
    ep: int = 1
    """Size of the groups of dp ranks that share one copy of the experts, for mixtures."""
    balance: float = 0.0
    tied: bool = True
    scalar: bool = False
    dtype: str = "float64"
    budget: int = 20
    """Tokens of a micro-batch."""
    checkpointing: bool = False
    kv_heads: int = 4
    layers: int = 5
    sequence: bool = False
    most_logits: int = MOST_LOGITS
    """Largest number of logits that a pass holds at once; a micro-batch has some hundreds."""
    lopsided: bool = False
    """True if the first replica has all rows."""
    loss: str = "policy"
    """Loss: "policy" over rows, "pairs", or "answers", each with another answer for comparison."""

    @property
    def alone(self) -> Case:
        """Return the same training on one rank, with micro-batches of another size."""
        return Case(
            kind=self.kind,
            tied=self.tied,
            scalar=self.scalar,
            dtype=self.dtype,
            budget=60,
            layers=self.layers,
            balance=self.balance,
            loss=self.loss,
        )


def decoder(case: Case) -> PreTrainedModel:
    """Return a small decoder; no mesh axis divides its vocabulary."""
    register()
    torch.manual_seed(0)
    settings = {
        "vocab_size": 63,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": case.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": case.kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if case.kind == "mixtral":
        settings["num_local_experts"] = 4
    config = AutoConfig.for_model(
        case.kind, **settings, **tokens, initializer_range=0.2, tie_word_embeddings=case.tied, num_labels=1
    )
    auto: Any = AutoModelForSequenceClassification if case.scalar else AutoModelForCausalLM
    module = auto.from_config(config, attn_implementation=ATTENTION)
    if case.dtype == "float64" and case.kind == "mixtral":
        module.set_experts_implementation("eager")  # grouped products do not support float64
    return module.to(getattr(torch, case.dtype)).eval()


def rows() -> Batch:
    """Return rows of prompts with two samples; a quarter of them have no loss tokens."""
    generator = torch.Generator().manual_seed(1)
    texts, masks, ids = [], [], []
    for row in range(NUM_ROWS):
        prompt, answer = torch.randint(1, 9, (2,), generator=generator).tolist()
        texts.append(torch.randint(0, 60, (prompt + answer,), generator=generator).tolist())
        masks.append([False] * prompt + [True] * answer)
        ids.append(RowId(0, row // 2, row % 2))
    tokens = Ragged.from_rows(texts)
    drawn = torch.randn(len(tokens.values), generator=generator)
    advantages = torch.randn(NUM_ROWS, generator=generator)
    advantages[2:4] = 0
    return Batch(
        ids=row_ids(ids),
        fields={
            "tokens": tokens,
            "loss_mask": Ragged.from_rows(masks, torch.bool),
            "advantages": advantages,
            "sampler_logprobs": tokens.with_values(drawn - 4),
            "returns": tokens.with_values(drawn),
            "old_values": tokens.with_values(drawn * 0),
            "reference_totals": -4.0 * Ragged.from_rows(masks).sums() - 3 * advantages.double(),
            "label": torch.tensor([row % 4 < 2 for row in range(NUM_ROWS)]),
        },
    )


def trainer(case: Case, module: nn.Module, parallel: Parallel | None) -> Trainer:
    config = TrainConfig(
        lr=1e-3,
        beta1=0.0,  # so that the first moment is the clipped gradient itself
        max_grad_norm=0.25,
        tokens_per_micro_batch=case.budget,
        gradient_checkpointing=case.checkpointing,
        balance=case.balance,
    )
    return Trainer(module, config, total_steps=2, parallel=parallel)


def scores(case: Case, made: Trainer, batch: Batch) -> Ragged:
    return made.scorer.values(batch) if case.scalar else made.scorer.logprobs(batch)


def update(case: Case, made: Trainer, batch: Batch) -> dict[str, Any]:
    if case.scalar:
        return made.update(batch, ValueLoss(ValueLossConfig(clip=0)))
    if case.loss != "policy":
        paired = AnswerLoss(PairLossConfig(nll=0.1)), AnswerLoss(UnpairedLossConfig())
        return made.update(batch, paired[case.loss == "answers"])
    return made.update(batch, PolicyLoss(PolicyLossConfig(), max_tokens=16))


def trained(case: Case, module: nn.Module, batch: Batch, parallel: Parallel | None = None) -> dict[str, Any]:
    """Run two steps; return scores before, metrics of both, the first clipped gradient, the final weights."""
    made = trainer(case, module, parallel)
    before = scores(case, made, batch)
    metrics = [update(case, made, batch)]
    state = made.optimizer.state()
    gradients = {name: state[f"exp_avg/{name}"].clone() for name, _ in module.named_parameters()}
    metrics.append(update(case, made, batch))
    weights = dict(module.named_parameters())
    return {
        "scores": {batch.row_id(place): row.numpy() for place, row in enumerate(before.rows())},
        "metrics": metrics,
        "gradients": {name: whole(weights[name], found).numpy() for name, found in gradients.items()},
        "weights": {name: whole(found).double().numpy() for name, found in weights.items()},
    }


def whole(parameter: Tensor, held: Tensor | None = None) -> Tensor:
    """Return the whole tensor of a parameter or of another tensor that is sharded like it."""
    parameter = parameter.detach()
    if not isinstance(parameter, DTensor):
        return parameter if held is None else held
    held = parameter.to_local() if held is None else held
    mesh, cuts = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        held, mesh, cuts, shape=parameter.shape, stride=parameter.stride()
    ).full_tensor()


def groups_of(case: Case, ranks: Ranks) -> RankGroups:
    return rank_groups(Mesh.of(dp=case.dp, pp=case.pp, tp=case.tp), ranks, case.fsdp, case.ep)


def own_rows(case: Case, place: RankGroups) -> Batch:
    """Return every dp-th row, or all rows on the first replica."""
    batch = rows()
    if case.lopsided:
        return batch if place.dp.rank == 0 else batch.select([])
    if case.loss != "policy":
        return batch.select([row for row in range(len(batch)) if row // 2 % place.dp.size == place.dp.rank])
    return batch.select(list(range(place.dp.rank, len(batch), place.dp.size)))


def train_all(ranks: Ranks, cases: list[Case]) -> list[dict[str, Any]]:
    """Run all cases on a rank and return their results."""
    found = []
    for case in cases:
        place = groups_of(case, ranks)
        module = decoder(case)
        parallel = Parallel(module, place, sequence=case.sequence, most_logits=case.most_logits)
        result = trained(case, module, own_rows(case, place), parallel)
        found.append({**result, "speaks": place.speaks})
    return found
