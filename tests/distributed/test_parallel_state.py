"""Parallel training state: contents of ranks, refusals on all ranks at once, and a bit-identical resume."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from rillflow.errors import RillflowError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.attention import ATTENTION
from rillflow.models.tensor_plan import tensor_plan, weight_parts
from rillflow.placement.sbp import Broadcast
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss, SupervisedLoss
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parent))
from meshes import Case, decoder, groups_of, own_rows, rows, trainer, update
from processes import together

POLICY = PolicyLoss(PolicyLossConfig(), max_tokens=16)


def held_bytes(ranks: Ranks, cases: list[Case]) -> list[int]:
    found = []
    for case in cases:
        parallel = Parallel(decoder(case), groups_of(case, ranks))
        memory = {held.untyped_storage().data_ptr(): held for held in parallel.local_weights().values()}
        found.append(sum(held.untyped_storage().nbytes() for held in memory.values()))
    return found


def test_a_rank_holds_its_part_alone() -> None:
    base = Case(tied=False, dtype="float32")
    whole = sum(weight.nbytes for weight in decoder(base).parameters())
    cases = [
        replace(base, pp=2),
        replace(base, dp=2, fsdp=2),
        replace(base, tp=2),
        replace(base, pp=2, tied=True),
    ]
    by_rank = together(2, held_bytes, cases)
    stages, shards, tensors, tied = (sum(found[place] for found in by_rank) for place in range(4))
    assert stages == whole
    assert tied == whole  # the head is another copy of the embedding, on the last stage
    assert whole <= shards < 1.05 * whole  # shards are padded to one length
    assert max(found[1] for found in by_rank) < 0.52 * whole
    parts = weight_parts(tensor_plan(decoder(base)), decoder(base))
    copies = sum(
        weight.nbytes
        for name, weight in decoder(base).named_parameters()
        if isinstance(parts[name], Broadcast)
    )
    assert tensors == whole + copies and copies < 0.1 * whole


def refusals(ranks: Ranks) -> list[str]:
    """Return the errors of every rank if one of them cannot continue."""
    case = Case(pp=2)
    parallel = Parallel(decoder(case), groups_of(case, ranks))
    made = Trainer(parallel.module, TrainConfig(tokens_per_micro_batch=20), total_steps=9, parallel=parallel)
    before = {name: held.clone() for name, held in parallel.local_weights().items()}
    said = []
    sampled = made.scorer.logprobs(rows())
    sampled.values[-1] += 1  # in the last of several micro-batches
    try:
        made.update(rows().with_fields(sampler_logprobs=sampled), POLICY, ratio_tolerance=1e-3)
    except RillflowError as error:
        said.append(str(error))
    with torch.no_grad():  # on one stage only
        if not parallel.groups.first:
            parallel.parameters["model.norm.weight"].fill_(float("nan"))
    try:
        made.update(rows(), SupervisedLoss())
    except RillflowError as error:
        said.append(str(error))
    after = parallel.local_weights()
    kept = [name for name, held in before.items() if torch.equal(held, after[name])]
    said.append(str(len(before) - len(kept)))
    said.append(str(made.optimizer.steps))
    return said


def test_what_one_rank_refuses_all_refuse() -> None:
    first, second = together(2, refusals)
    assert first[:2] == second[:2]
    assert first[0].startswith("the first minibatch is not on-policy: at token ")
    assert first[1].startswith("the loss is nan: token ")
    assert [first[2:], second[2:]] == [["0", "0"], ["1", "0"]]


def impossible(ranks: Ranks) -> list[str]:
    said = []
    plain = GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=64)
    decoder(Case())  # registers the attention
    gpt2 = AutoModelForCausalLM.from_config(plain, attn_implementation=ATTENTION)
    for module, case in ((gpt2, Case(tp=2)), (gpt2, Case(pp=2)), (decoder(Case(kv_heads=1)), Case(tp=2))):
        try:
            Parallel(module, groups_of(case, ranks))
        except RillflowError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_cut_is_refused_on_every_rank() -> None:
    by_rank = together(2, impossible)
    assert by_rank[0] == by_rank[1]
    plan, stages, heads = by_rank[0]
    assert plan.startswith("GPT2LMHeadModel has no tensor-parallel plan") and "dp and pp work" in plan
    assert stages.startswith("GPT2LMHeadModel cannot be cut into pipeline stages")
    assert "tp is 2 and the model has 1 key/value heads" in heads and "1 / 2 leaves 1" in heads


def gone_on(ranks: Ranks, case: Case) -> list[bool]:
    """Run three steps in one go, and one step followed by two with a new trainer and a new module."""
    place = groups_of(case, ranks)
    batch = own_rows(case, place)
    parallel = Parallel(decoder(case), place)
    straight = trainer(case, parallel.module, parallel)
    update(case, straight, batch)
    saved = {name: tensor.clone() for name, tensor in straight.optimizer.state().items()}
    weights = {name: held.clone() for name, held in parallel.local_weights().items()}
    update(case, straight, batch)
    again = Parallel(decoder(case), place)
    with torch.no_grad():
        for name, held in again.local_weights().items():
            held.copy_(weights[name])
    resumed = trainer(case, again.module, again)
    resumed.optimizer.load_state(saved)
    update(case, resumed, batch)
    one, other = parallel.local_weights(), again.local_weights()
    tensors = straight.optimizer.state()
    return [
        all(torch.equal(one[name], other[name]) for name in one),
        all(torch.equal(tensors[name], found) for name, found in resumed.optimizer.state().items()),
        not all(torch.equal(one[name], weights[name]) for name in one),
        {name.partition("/")[2] for name in tensors} == {*one, "step"},
        all(tensors[f"exp_avg/{name}"].shape == held.shape for name, held in one.items()),
    ]


def test_training_goes_on_bit_for_bit() -> None:
    for case in (Case(dp=2, pp=2, fsdp=2), Case(kind="qwen2", pp=2, tp=2, dtype="bfloat16")):
        assert together(4, gone_on, case) == [[True] * 5] * 4
