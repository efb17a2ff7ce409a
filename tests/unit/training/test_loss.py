"""Losses on a real model: on-policy gradient laws, reductions and partitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, get_args

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rillflow.errors import NotFiniteError, TrainingError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.formulas.logprobs import TokenLogprobs
from rillflow.formulas.losses import Aggregation, TokenLosses, cross_entropy
from rillflow.formulas.preferences import PairLossConfig
from rillflow.formulas.unpaired import UnpairedLossConfig
from rillflow.graph.loss import LossSection, LossTerm
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import Histogram
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.training.config import TrainConfig
from rillflow.training.guards import loss_tokens
from rillflow.training.loss import LossPart, PolicyLoss, SupervisedLoss, TokenLoss, loss_of
from rillflow.training.scorer import LogprobReader, Scorer, micro_batches
from rillflow.training.trainer import Trainer

MakeRows = Callable[..., Batch]


def sampled(module: PreTrainedModel, rows: Batch, drift: float = 0.0) -> Batch:
    """Return the rows with sampler, old and reference log probabilities near the module's own."""
    found = Scorer(module, TrainConfig()).logprobs(rows)
    generator = torch.Generator().manual_seed(5)
    fields = {}
    for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs"):
        noise = drift * torch.randn(found.values.shape, generator=generator)
        fields[name] = found.with_values(found.values + noise * rows.ragged("loss_mask").values)
    return rows.with_fields(**fields)


def gradient(module: PreTrainedModel, rows: Batch, loss: TokenLoss, budget: int = 16384) -> dict[str, Tensor]:
    module.zero_grad()
    prepared, scorer = loss.prepare(rows), Scorer(module, TrainConfig())
    for index in micro_batches(prepared, budget):
        part = prepared.select(index)
        terms = loss(scorer.forward(part, LogprobReader()), loss_tokens(part)).terms
        (terms.sum() / float(part.dense("loss_denominator")[0])).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def reinforce(module: PreTrainedModel, rows: Batch, weights: Tensor) -> dict[str, Tensor]:
    """Return the gradient of -sum(weights x A log pi), with the module only, row after row."""
    module.zero_grad()
    tokens, masks = rows.ragged("tokens").rows(), rows.ragged("loss_mask").rows()
    shares = torch.split(weights, rows.ragged("tokens").lengths.tolist())
    for row, mask, share, advantage in zip(tokens, masks, shares, rows.dense("advantages"), strict=True):
        logs = module(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = logs.gather(-1, row[1:, None])[:, 0]
        (-(advantage * chosen * share[1:].float())[mask[1:]].sum()).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], relative: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    size = torch.cat([grad.flatten() for grad in other.values()]).norm()
    gap = torch.cat([(one[name] - other[name]).flatten() for name in one]).norm()
    assert float(gap / size) < relative
    assert float(size) > 1e-3


@pytest.mark.parametrize("how", get_args(Aggregation))
@pytest.mark.parametrize("with_old", [True, False])
def test_on_policy_every_policy_loss_has_the_gradient_of_a_log_pi(
    module: PreTrainedModel, make_rows: MakeRows, how: str, with_old: bool
) -> None:
    rows = sampled(module, make_rows(samples=4))
    if not with_old:
        rows = rows.only("tokens", "loss_mask", "advantages", "sampler_logprobs")
    loss = PolicyLoss(PolicyLossConfig(aggregation=how, correction="tis"), max_tokens=9)
    count = rows.ragged("loss_mask").sums().double()
    weights = {
        "token_mean": torch.ones(len(rows)) / count.sum(),
        "sequence_mean": 1 / count / len(rows),
        "constant": torch.ones(len(rows)) / (9 * len(rows)),
    }[how]
    expected = reinforce(module, rows, rows.ragged("tokens").expand(weights))
    assert_close(gradient(module, rows, loss), expected)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["clip", "weight"])
def test_on_policy_neither_ratio_nor_surrogate_nor_the_advantages_form_matters(
    module: PreTrainedModel, make_rows: MakeRows, ratio: str, surrogate: str
) -> None:
    rows = sampled(module, make_rows(samples=4))
    expected = gradient(module, rows, PolicyLoss(PolicyLossConfig()))
    loss = PolicyLoss(PolicyLossConfig(ratio=ratio, surrogate=surrogate))
    assert_close(gradient(module, rows, loss), expected)
    assert_close(gradient(module, by_token(rows), loss, budget=30), expected)


def by_token(rows: Batch) -> Batch:
    """Return the same advantages aligned to tokens, with NaN at prompt tokens, which must not be read."""
    mask = rows.ragged("loss_mask")
    spread = torch.where(mask.values, mask.expand(rows.dense("advantages")), math.nan)
    return rows.with_fields(advantages=mask.with_values(spread))


def unclipped(logprobs: Tensor, advantages: Tensor, *, scale: float) -> Tensor:
    """A custom loss."""
    return -scale * logprobs * advantages


OWN = {"model_outputs": ("logprobs", "entropy"), "name": "policy"}


def test_a_loss_of_ones_own_is_a_function(module: PreTrainedModel, make_rows: MakeRows) -> None:
    rows = sampled(module, make_rows(samples=4))
    expected = gradient(module, rows, PolicyLoss(PolicyLossConfig()))
    loss = TokenLoss(unclipped, options={"scale": 1.0}, **OWN)
    assert_close(gradient(module, rows, loss, budget=30), expected)
    assert_close(gradient(module, by_token(rows), loss), expected)


def ratio_of(old_logprobs: Tensor, logprobs: Tensor, row_lengths: Tensor) -> TokenLosses:
    """A loss that reads a value without a field, and returns metrics."""
    longest = torch.repeat_interleave(row_lengths, row_lengths)
    ratio = (logprobs - old_logprobs).exp()
    return TokenLosses(losses=ratio, metrics={"own/ratio/mean": ratio, "own/length/max": longest})


def test_a_loss_is_given_the_old_policy_and_the_lengths_of_rows(
    module: PreTrainedModel, make_rows: MakeRows
) -> None:
    rows = sampled(module, make_rows(samples=4), drift=0.5)
    mask = rows.ragged("loss_mask")
    now = Scorer(module, TrainConfig()).logprobs(rows).values
    drifted = float((now - rows.ragged("old_logprobs").values)[mask.values].exp().mean())
    for known, mean in ((rows, drifted), (rows.only("tokens", "loss_mask"), 1.0)):
        loss = TokenLoss(ratio_of, **OWN)
        prepared = loss.prepare(known)
        found = loss(Scorer(module, TrainConfig()).forward(prepared, LogprobReader()), loss_tokens(prepared))
        assert found.metrics["own/ratio/mean"].value == pytest.approx(mean, rel=1e-5)
        assert found.metrics["own/length/max"].value == int(mask.sums().max())


def mean_of_all(logprobs: Tensor) -> Tensor:
    return -logprobs.mean()


def nothing(logprobs: Tensor) -> None:
    del logprobs


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (mean_of_all, r"the loss mean_of_all returned shape \[\].*it must return one loss per token"),
        (nothing, r"the loss nothing returned None"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(
    module: PreTrainedModel, make_rows: MakeRows, function: Callable[..., Tensor], match: str
) -> None:
    loss, rows = TokenLoss(function, **OWN), make_rows()
    with pytest.raises(TrainingError, match="(?s)" + match):
        gradient(module, rows, loss)


def root(logprobs: Tensor) -> Tensor:
    return (logprobs + 2).sqrt()


def test_a_loss_that_is_not_finite_is_told_by_its_token(module: PreTrainedModel, make_rows: MakeRows) -> None:
    with pytest.raises(NotFiniteError, match=r"the loss is nan: token \d+ \(id \d+\) of row .* has loss nan"):
        Trainer(module, TrainConfig(), total_steps=1).update(make_rows(), TokenLoss(root, **OWN))


def reads_more(logprobs: Tensor, advantage: Tensor) -> Tensor:
    return -logprobs * advantage


def test_a_loss_that_reads_a_field_nobody_made_is_refused(
    module: PreTrainedModel, make_rows: MakeRows
) -> None:
    with pytest.raises(TrainingError, match=r"(?s)reads_more reads the field 'advantage'.*'advantages'"):
        gradient(module, sampled(module, make_rows()), TokenLoss(reads_more, **OWN))


@pytest.mark.parametrize("form", [{}, {"ratio": "sequence"}, {"surrogate": "weight"}])
@pytest.mark.parametrize("how", get_args(Aggregation))
def test_partition_blind_through_the_model(
    module: PreTrainedModel, make_rows: MakeRows, how: str, form: dict[str, str]
) -> None:
    rows = sampled(module, make_rows(prompts=(5, 3, 8), samples=4), drift=0.2)
    config = PolicyLossConfig(aggregation=how, kl=0.1, entropy=0.01, correction="tis", constant=9, **form)
    whole = gradient(module, rows, PolicyLoss(config))
    for budget in (1, 25, 60):
        assert_close(gradient(module, rows, PolicyLoss(config), budget), whole)
    backwards = rows.select(list(range(len(rows)))[::-1])
    assert_close(gradient(module, backwards, PolicyLoss(config), 40), whole)


def test_dapo_with_equal_clips_is_grpo_with_token_mean(module: PreTrainedModel, make_rows: MakeRows) -> None:
    rows = sampled(module, make_rows(), drift=0.3)
    dapo = PolicyLossConfig(clip_low=0.2, clip_high=0.2, dual_clip=0, kl=0, aggregation="token_mean")
    advantages = rows.ragged("tokens").expand(rows.dense("advantages"))
    mask = rows.ragged("loss_mask").values
    own = Scorer(module, TrainConfig())
    now = own.forward(rows, LogprobReader()).logprobs
    ratio = (now - rows.ragged("old_logprobs").values[mask]).exp()
    a = advantages[mask]
    by_hand = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    module.zero_grad()
    by_hand.backward()
    expected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert_close(gradient(module, rows, PolicyLoss(dapo)), expected)


def test_supervised_is_cross_entropy(module: PreTrainedModel, make_rows: MakeRows) -> None:
    rows = make_rows(prompts=(4,), samples=1)
    tokens, mask = rows.ragged("tokens").values, rows.ragged("loss_mask").values
    found = gradient(module, rows, SupervisedLoss())
    module.zero_grad()
    labels = torch.where(mask, tokens, -100)
    module(input_ids=tokens[None], labels=labels[None], use_cache=False).loss.backward()
    assert_close(found, {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})


def call(config: PolicyLossConfig, rows: Batch, logprobs: Tensor, entropy: float = 1.0) -> LossPart:
    model = TokenLogprobs(
        logprobs=logprobs,
        entropy=torch.full_like(logprobs, entropy),
        likeliest=torch.ones_like(logprobs, dtype=torch.bool),
    )
    loss = PolicyLoss(config)
    return loss(model, loss_tokens(loss.prepare(rows)))


def four_tokens() -> Batch:
    """Return two rows of two loss tokens with advantages 1 and -1, sampled with log probability -1."""
    mask = torch.tensor([False, False, True, True])
    minus_one = torch.where(mask, -1.0, 0.0)

    def aligned(values: Tensor) -> Ragged:
        return Ragged(values=values.repeat(2), lengths=torch.tensor([4, 4]))

    return Batch(
        ids=row_ids([RowId(0, 0, 0), RowId(0, 1, 0)]),
        fields={
            "tokens": aligned(torch.arange(4)),
            "loss_mask": aligned(mask),
            "advantages": torch.tensor([1.0, -1.0]),
            "sampler_logprobs": aligned(minus_one),
            "old_logprobs": aligned(minus_one),
            "reference_logprobs": aligned(minus_one),
        },
    )


def test_metrics_say_what_they_are_named_for() -> None:
    rows = four_tokens()
    sampler = rows.ragged("sampler_logprobs")
    rows = rows.with_fields(sampler_logprobs=sampler.with_values(sampler.values * 1.5))  # mu / old = e^-0.5
    now = torch.tensor([-1.0, 0.0, -1.0, -3.0])  # ratios 1, e, 1, e^-2
    found = call(PolicyLossConfig(kl=0.5, correction="tis"), rows, now).metrics
    lies = found.pop("mismatch/log_ratio/histogram")
    assert isinstance(lies, Histogram) and lies.counts == (0,) * 13 + (4, 0, 0, 0)  # 0.5 is at most 0.5
    values = {name: metric.value for name, metric in found.items()}
    ratios = [1.0, math.e, 1.0, math.exp(-2)]
    k3 = [0.0, math.exp(-1) - 1 + 1, 0.0, math.exp(2) - 1 - 2]
    assert values == pytest.approx(
        {
            "policy/ratio/mean": sum(ratios) / 4,
            "policy/ratio/max": math.e,
            "policy/clipped/share": 0.5,
            "policy/clamped/share": 0.0,
            "policy/clipped_low/share": 0.25,
            "policy/clipped_high/share": 0.25,
            "policy/advantage/mean": 0.0,
            "policy/entropy/mean": 1.0,
            "policy/kl/mean": sum(k3) / 4,
            "policy/kl/largest_share": (math.exp(2) - 3) / sum(k3),
            "mismatch/kl/mean": math.exp(0.5) - 1 - 0.5,
            "mismatch/logprob_gap/max": 0.5,
            "mismatch/bounded/share": 0.0,
            "mismatch/weight/mean": math.exp(0.5),
        },
        rel=1e-5,
        abs=1e-7,
    )


@pytest.mark.parametrize("old", [-1.0, -1.5])
def test_the_divergence_from_the_sampler_is_the_present_policys(old: float) -> None:
    """Independent of the ratio's denominator; measured only on rows that may be stale."""
    rows = four_tokens()
    now = torch.tensor([-1.0, 0.0, -1.0, -3.0])
    rows = rows.with_fields(old_logprobs=rows.ragged("old_logprobs").with_values(torch.full((8,), old)))
    assert "staleness/kl/mean" not in call(PolicyLossConfig(), rows, now).metrics
    ages = rows.ragged("tokens").with_values(torch.ones(8, dtype=torch.int64))
    found = call(PolicyLossConfig(), rows.with_fields(versions_behind=ages), now).metrics
    k3 = [0.0, math.e - 1 - 1, 0.0, math.exp(-2) - 1 + 2]
    assert found["staleness/kl/mean"].value == pytest.approx(sum(k3) / 4)


@pytest.mark.parametrize(
    ("far", "value", "share"),
    [
        ("old_logprobs", -120.0, 0.25),
        ("sampler_logprobs", -120.0, 0.25),
        ("reference_logprobs", 119.0, 0.25),
        ("reference_logprobs", 3.61, 0.25),
        ("reference_logprobs", 3.60, 0.0),
        ("reference_logprobs", -120.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_tokens_that_meet_a_bound_are_counted_and_leave_the_loss_finite(
    far: str, value: float, share: float
) -> None:
    """The bounds are 20 nats, and log 100 = 4.605 above the policy's -1 for the reference."""
    rows = four_tokens()
    if far:
        column = rows.ragged(far)
        values = column.values.clone()
        values[3] = value
        rows = rows.with_fields(**{far: column.with_values(values)})
    now = torch.full((4,), -1.0, requires_grad=True)
    found = call(PolicyLossConfig(kl=0.5, correction="tis"), rows, now)
    found.terms.sum().backward()
    assert now.grad is not None and bool(now.grad.isfinite().all())
    assert found.metrics["policy/clamped/share"].value == share
    assert all(math.isfinite(metric.value) for metric in found.metrics.values())


@pytest.mark.parametrize("bound", [2.0, 100.0, 4e8])
def test_one_token_far_below_the_reference_pulls_by_the_bound(bound: float) -> None:
    """Three of four tokens equal the reference; the last has d = -10, and e^10 is 22,026."""
    rows = four_tokens()
    near = rows.ragged("reference_logprobs")
    values = near.values.masked_scatter(near.values != 0, torch.tensor([-1.0, -1.0, -1.0, 9.0]))
    rows = rows.with_fields(reference_logprobs=near.with_values(values), advantages=torch.zeros(2))
    now = torch.full((4,), -1.0, requires_grad=True)
    found = call(PolicyLossConfig(kl=0.5, kl_bound=bound), rows, now)
    found.terms.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0, 0, 0, 0.5 * (1 - min(bound, math.exp(10)))], rel=1e-5)
    assert found.metrics["policy/kl/largest_share"].value == 1
    assert found.metrics["policy/kl/mean"].value == pytest.approx((math.exp(10) - 11) / 4, rel=1e-5)


def test_the_metrics_of_other_ratios_and_surrogates_are_theirs() -> None:
    rows, now = four_tokens(), torch.tensor([-1.0, 0.0, -1.0, -3.0])  # log ratios 0, 1 and 0, -2
    found = call(PolicyLossConfig(ratio="sequence"), rows, now).metrics
    assert found["policy/ratio/mean"].value == pytest.approx((math.exp(0.5) + math.exp(-1)) / 2)
    assert found["policy/clipped_high/share"].value == found["policy/clipped_low/share"].value == 0.5
    found = call(PolicyLossConfig(clip_low=0, clip_high=0), rows, now).metrics  # 1 is the bound itself
    assert found["policy/clipped_high/share"].value == found["policy/clipped_low/share"].value == 0.25
    advantages = torch.tensor([-1.0, 1.0])  # signs for which the clip surrogate has no bound
    rows = rows.with_fields(advantages=advantages)
    for surrogate, share in (("clip", 0.0), ("weight", 0.25)):
        found = call(PolicyLossConfig(surrogate=surrogate), rows, now).metrics
        assert found["policy/clipped_high/share"].value == found["policy/clipped_low/share"].value == share


def test_a_bounded_weight_is_paid_for_beyond_the_bound() -> None:
    now = torch.tensor([-1.0, 0.0, -1.0, -3.0], requires_grad=True)  # ratios 1, e and 1, e^-2
    call(PolicyLossConfig(surrogate="weight", clip_high=0.28), four_tokens(), now).terms.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.0, -1.28, 1.0, 0.8])


def test_advantages_of_tokens_weigh_each_its_own() -> None:
    rows, now = four_tokens(), torch.full((4,), -1.0)
    mask = rows.ragged("loss_mask")
    mixed = mask.with_values(torch.tensor([math.nan, 9.0, 1.0, -2.0, 0.0, 5.0, 0.0, 0.0]))
    rows = rows.with_fields(advantages=mixed)
    assert call(PolicyLossConfig(), rows, now).terms.tolist() == [-1.0, 2.0, 0.0, 0.0]
    assert PolicyLoss(PolicyLossConfig()).prepare(rows).dense("loss_active").tolist() == [True, False]
    values = mixed.values.clone()
    values[3] = math.nan
    with pytest.raises(
        TrainingError, match=r"advantages is nan at token 3 \(id 3\) of row \(epoch 0 prompt 0"
    ):
        PolicyLoss(PolicyLossConfig()).prepare(rows.with_fields(advantages=mask.with_values(values)))


def test_each_companion_adds_its_term() -> None:
    rows = four_tokens()
    now = torch.tensor([-1.0, -1.0, -1.0, -2.0])
    base = call(PolicyLossConfig(), rows, now).terms
    with_entropy = call(PolicyLossConfig(entropy=0.5), rows, now, entropy=3.0).terms
    with_kl = call(PolicyLossConfig(kl=2.0, kl_estimator="k2"), rows, now).terms
    in_reward = call(PolicyLossConfig(kl=2.0, kl_in="reward"), rows, now).terms
    assert (with_entropy - base).tolist() == pytest.approx([-1.5] * 4)
    assert (with_kl - base).tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0])
    assert torch.equal(in_reward, base)


def test_the_correction_weighs_by_old_over_sampler_up_to_the_cap() -> None:
    rows = four_tokens()
    old = rows.ragged("old_logprobs")
    drifted = rows.with_fields(old_logprobs=old.with_values(old.values + 1))  # old / mu = e on every token
    now = torch.full((4,), 0.0)
    plain = call(PolicyLossConfig(), drifted, now).terms
    capped = call(PolicyLossConfig(correction="tis"), drifted, now)
    free = call(PolicyLossConfig(correction="tis", correction_bounds=(0, 5)), drifted, now).terms
    assert (capped.terms / plain).tolist() == pytest.approx([2.0] * 4)
    assert (free / plain).tolist() == pytest.approx([math.e] * 4)
    assert capped.metrics["mismatch/bounded/share"].value == 1.0


def test_a_group_of_equal_rewards_has_no_gradient(module: PreTrainedModel, make_rows: MakeRows) -> None:
    rows = sampled(module, make_rows(), drift=0.1).with_fields(advantages=torch.zeros(6))
    found = gradient(module, rows, PolicyLoss(PolicyLossConfig()))
    assert all(not bool(grad.any()) for grad in found.values())


@pytest.mark.parametrize("loss", [SupervisedLoss(), PolicyLoss(PolicyLossConfig(), max_tokens=4)])
def test_a_minibatch_without_loss_tokens_is_refused(make_rows: MakeRows, loss: TokenLoss) -> None:
    rows = make_rows()
    mask = rows.ragged("loss_mask")
    nothing = mask.with_values(torch.zeros_like(mask.values))
    silent = rows.with_fields(
        loss_mask=nothing, sampler_logprobs=mask.with_values(torch.zeros(len(mask.values)))
    )
    with pytest.raises(TrainingError, match="minibatch of 6 rows has no loss token"):
        loss.prepare(silent)


@pytest.mark.parametrize("name", ["sampler_logprobs", "old_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_names_row_and_token(name: str, value: float) -> None:
    rows = four_tokens()
    column = rows.ragged(name)
    values = column.values.clone()
    values[0] = math.nan  # prompt tokens are never read
    values[7] = value
    broken = rows.with_fields(**{name: column.with_values(values)})
    with pytest.raises(
        TrainingError, match=rf"{name} is {value} at token 3 \(id 3\) of row \(epoch 0 prompt 1"
    ):
        PolicyLoss(PolicyLossConfig(kl=0.1)).prepare(broken)


def test_an_advantage_that_is_not_finite_names_its_row() -> None:
    broken = four_tokens().with_fields(advantages=torch.tensor([0.0, math.nan]))
    with pytest.raises(TrainingError, match=r"advantages is nan at row \(epoch 0 prompt 1 sample 0\)"):
        PolicyLoss(PolicyLossConfig()).prepare(broken)


class HalvedLoss(TokenLoss):
    """A loss kind from outside the package."""

    def __init__(self, config: HalvedConfig, max_tokens: int) -> None:
        super().__init__(cross_entropy, model_outputs=("logprobs", "likeliest"), name=f"half/{max_tokens}")
        self.source = config


class HalvedConfig(LossSection):
    """The settings of that loss."""

    loss_kind: ClassVar[type] = HalvedLoss

    @property
    def reads(self) -> tuple[str, ...]:
        """See LossSection."""
        return ()


def test_a_section_says_which_kind_of_loss_it_stands_for() -> None:
    outputs = ("logprobs", "entropy", "likeliest")
    found = loss_of(LossTerm(loss=HalvedConfig(), count=1), outputs, "policy", 7)
    assert type(found) is HalvedLoss and found.name == "half/7"
    assert found.about()["source"] == f"{__name__}:HalvedConfig"
    kinds = [
        loss_of(LossTerm(loss=section, count=1), outputs, "policy", 7)
        for section in (PolicyLossConfig(), PairLossConfig(), UnpairedLossConfig())
    ]
    assert [each.rows_together for each in kinds] == [1, 2, 2]
    with pytest.raises(TrainingError, match="critic cannot use the loss PairLossConfig"):
        loss_of(LossTerm(loss=PairLossConfig(), count=1), ("values",), "critic")
