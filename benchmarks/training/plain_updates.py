"""A plain loop: an update's gradient, one row at a time, eager attention, formulas written out as loops.

    files of a run ─> rows ─ rewards, advantages of each algorithm ─ loss of a row ─ backward ──> gradient

``rillflow.formulas`` and ``rillflow.training`` compute nothing here. ``whole_updates.py`` compares the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from peers.plain_scores import score
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rillflow.formulas.config import PolicyLossConfig
from rillflow.runs.reader import rollout_columns

TEMPERATURE, MAX_TOKENS, EPSILON = 0.7, 6, 1e-6


@dataclass(kw_only=True)
class Row:
    """A row of the plain loop; lists have one entry per loss token."""

    tokens: list[int]
    """All tokens of the row."""
    places: list[int]
    """Positions of the loss tokens."""
    sampler: list[float]
    """Log probabilities at sampling time."""
    group: int
    """Prompt id, which names the sample group."""
    reward: float | None = None
    """Reward; None if the row abstained."""
    cost: float = 0.0
    """Value of the cost function."""
    finish: str = "stop"
    """Reason for the end of the row."""
    text: str = ""
    """Text of the answer."""
    advantages: list[float] = field(default_factory=list)
    """Advantage of each loss token."""
    old: list[float] | None = None
    """Log probabilities of the old policy; None if it is the current policy."""
    reference: list[float] = field(default_factory=list)
    """Log probabilities of the reference."""


Weights = dict[str, Tensor]
"""Tensors by weight name."""


def divergence(log_ratio: Any, estimator: str) -> Any:
    """Return k1, k2 or k3 of one token, as a number or a tensor."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    exp = math.exp if isinstance(log_ratio, float) else torch.exp
    return exp(-log_ratio) - 1 + log_ratio


def logits_of(model: Any, row: Row) -> Tensor:
    """Return [N, V] log probabilities that predict each loss token, at the sampling temperature."""
    found = model(torch.tensor([row.tokens]), use_cache=False).logits[0].double() / TEMPERATURE
    return torch.log_softmax(found[[place - 1 for place in row.places]], -1)


def logprobs_of(model: Any, row: Row) -> list[float]:
    """Return the log probability of each loss token."""
    if not row.places:
        return []
    with torch.no_grad():
        return chosen(logits_of(model, row), row).tolist()


def chosen(table: Tensor, row: Row) -> Tensor:
    """Return the entries of the loss tokens, [N]."""
    return table[torch.arange(len(row.places)), [row.tokens[place] for place in row.places]]


def gradient(model: Any, rows: Sequence[Row], loss: PolicyLossConfig) -> Weights:
    """Return the gradient of the policy loss over the rows, accumulated row by row."""
    model.zero_grad()
    total = denominator(rows, loss)
    for row in rows:
        if row.places:
            (row_loss(model, row, loss) / total).backward()
    return gradients_of(model)


def gradients_of(model: Any) -> Weights:
    """Return the gradients after the backward passes."""
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
    }


def denominator(rows: Sequence[Row], loss: PolicyLossConfig) -> float:
    """Return the divisor of the sum over all rows."""
    if loss.aggregation == "token_mean":
        return sum(len(row.places) for row in rows)
    counted = sum(bool(row.places) for row in rows)
    return counted * (loss.constant or MAX_TOKENS) if loss.aggregation == "constant" else counted


def correction(
    loss: PolicyLossConfig, old: Sequence[float], sampler: Sequence[float], place: int, advantage: float
) -> float:
    """Return the weight of a token's loss; m2po is absent, because it needs a whole minibatch."""
    ratio, row = math.exp(old[place] - sampler[place]), math.exp(sum(old) - sum(sampler))
    match loss.correction:
        case "none":
            return 1.0
        case "tis":
            return min(max(ratio, loss.bounds[0]), loss.bounds[1])
        case "icepop":
            return ratio if loss.bounds[0] <= ratio <= loss.bounds[1] else 0.0
        case "sequence_tis":
            return min(max(row, loss.bounds[0]), loss.bounds[1])
        case "topr":
            return 1.0 if advantage >= 0 else min(max(row, loss.bounds[0]), loss.bounds[1])
    raise ValueError(loss.correction)


def row_loss(model: Any, row: Row, loss: PolicyLossConfig) -> Tensor:
    """Return the sum of a row's token losses, or their mean for "sequence_mean"."""
    table = logits_of(model, row)
    now, entropies = chosen(table, row), -(table.exp() * table).sum(-1)
    old = now.detach() if row.old is None else torch.tensor(row.old, dtype=torch.float64)
    log_ratio = now - old
    if loss.ratio == "sequence":
        log_ratio = log_ratio.detach().mean() + now - now.detach()
    losses = []
    for place, (ratio, advantage) in enumerate(zip(log_ratio.exp(), row.advantages, strict=True)):
        low, high = 1 - loss.clip_low, 1 + loss.clip_high
        if loss.surrogate == "weight":
            term = -ratio.detach().clamp(low, high) * advantage * now[place]
        else:
            gain = min(ratio * advantage, ratio.clamp(low, high) * advantage)
            term = -max(gain, gain.new_tensor(loss.dual_clip * advantage)) if advantage < 0 else -gain
            term = -gain if not loss.dual_clip else term
        term = term * correction(loss, [float(each) for each in old], row.sampler, place, advantage)
        if loss.kl and loss.kl_in == "loss":
            term = term + loss.kl * divergence(now[place] - row.reference[place], loss.estimator)
        losses.append(term - loss.entropy * entropies[place])
    found = torch.stack(losses)
    return found.mean() if loss.aggregation == "sequence_mean" else found.sum()


def spent(row: Row, loss: PolicyLossConfig) -> list[float]:
    """Return the divergence penalty of each token if it is part of the reward, else zeros."""
    if not loss.kl or loss.kl_in != "reward":
        return [0.0] * len(row.places)
    ratios = [mu - ref for mu, ref in zip(row.sampler, row.reference, strict=True)]
    return [loss.kl * divergence(ratio, loss.estimator) for ratio in ratios]


def spread(row: Row, advantage: float) -> None:
    """Set one advantage for all tokens of a row."""
    row.advantages = [advantage] * len(row.places)


def group_advantages(rows: Sequence[Row], config: Any) -> list[Row]:
    """Set the advantages of GRPO, Dr.GRPO, DAPO or RLOO within each group; return the rows that train."""
    kept = []
    for name in dict.fromkeys(row.group for row in rows):
        group = [row for row in rows if row.group == name]
        scored = [row for row in group if row.reward is not None]
        flat = len({row.reward for row in scored}) < 2
        paid = {id(row): shaped(row, config) for row in scored}
        plain = [shaped(row, config, is_charged=False) for row in scored]
        for row in group:
            if row.reward is None or len(scored) < 2 or (flat and config.name == "dapo"):
                spread(row, 0.0)
                continue
            rise = paid[id(row)] - mean(paid.values())
            if config.name == "rloo":
                rise *= len(scored) / (len(scored) - 1)
            elif config.scale == "std" and len(set(plain)) > 1:
                rise /= stdev(plain) + EPSILON
            spread(row, rise)
        kept += [] if flat and config.name == "dapo" else group
    return kept


def shaped(row: Row, config: Any, is_charged: bool = True) -> float:
    """Return a row's reward minus the penalties for a missing end, its length and optionally divergence."""
    reward = ended(row, config) - (sum(spent(row, config.loss)) if is_charged else 0.0)
    if config.name == "dapo" and config.overlong_buffer:
        over = (MAX_TOKENS - config.overlong_buffer - len(row.places)) / config.overlong_buffer
        reward += min(0.0, max(-1.0, over))
    return reward


def ended(row: Row, config: Any) -> float:
    """Return a row's reward minus the penalty for a missing end."""
    return (row.reward or 0.0) - (config.missing_end_penalty if row.finish == "length" else 0.0)


def at_the_last(score: float, others: Sequence[float]) -> list[float]:
    """Return each token's reward, with the score added to the last token."""
    return [*others[:-1], others[-1] + score] if others else []


def estimates(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Return the generalised advantage estimates of one row, computed from its last token backwards."""
    found, following, expected = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * expected - value + gamma * lam * following
        found.append(following)
        expected = value
    return found[::-1]


def whiten(rows: Sequence[Row]) -> None:
    """Scale the advantages of scored rows to mean 0 and deviation 1 over all their tokens."""
    every = [each for row in rows if row.reward is not None for each in row.advantages]
    for row in rows:
        if row.reward is not None:
            row.advantages = [(each - mean(every)) / (stdev(every) + EPSILON) for each in row.advantages]


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of a run of two steps."""

    run: Path
    """The run directory."""
    start: Path
    """The initial model of the run."""

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after a step."""
        return self.run / "checkpoints" / f"step-{step:06d}"

    def rows(self) -> list[Row]:
        """Return the rollouts of the second step."""
        columns = rollout_columns(self.run, 2)
        return [row_of(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]

    def model(self, path: Path) -> Any:
        """Load a language model in float64 with eager attention."""
        kind = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
        return kind.double().eval()

    def critic(self, name: str) -> Any:
        """Load a critic from before the second step."""
        model = AutoModelForSequenceClassification.from_pretrained(
            self.checkpoint(1) / name, attn_implementation="eager", dtype=torch.float32
        )
        return model.double().eval()

    def moments(self, role: str) -> Weights:
        """Return AdamW's first moment after the second step, which is the gradient if beta1 = 0."""
        tensors = load_file(self.checkpoint(2) / f"{role}.optimizer" / "rank-00000.safetensors")
        marks = ("exp_avg/", ":0")
        return {
            name.removeprefix(marks[0]).removesuffix(marks[1]): tensor
            for name, tensor in tensors.items()
            if name.startswith(marks[0])
        }

    def price(self) -> float:
        """Return Safe RLHF's multiplier in the second step."""
        state = json.loads((self.checkpoint(1) / "state.json").read_text())
        return math.exp(state["numbers"]["log_multiplier"])


def row_of(line: dict[str, Any]) -> Row:
    """Make a row from the columns of one recorded rollout."""
    places = [place for place, version in enumerate(line["versions"]) if version >= 0]
    return Row(
        tokens=line["tokens"],
        places=places,
        sampler=[line["logprobs"][place] for place in places],
        group=line["prompt_id"],
        reward=score(line["prompt"], line["completion"]),
        cost=line.get("cost", 0.0),
        finish=line["finish"],
        text=line["completion"],
    )


Trained = dict[str, Weights]
"""Gradients of every role that trains."""


def plain_step(files: Files, config: Any) -> Trained:
    """Return the gradients of a run's second step, computed from its files."""
    rows, policy = files.rows(), files.model(files.checkpoint(1) / "policy")
    if config.loss.kl:
        reference = files.model(files.start)
        for row in rows:
            row.reference = logprobs_of(reference, row)
    match config.name:
        case "ppo" | "safe_rlhf":
            return with_critics(files, config, rows, policy)
        case "reinforce_pp":
            for row in rows:
                earned = at_the_last(ended(row, config), [-each for each in spent(row, config.loss)])
                row.advantages = estimates(earned, [0.0] * len(earned), config.gamma, 1.0)
            whiten(rows)
        case "remax":
            over_greedy(files, policy, rows, config)
        case _:
            rows = group_advantages(rows, config)
    return {"policy": gradient(policy, learnt_from(unscored_at_rest(rows), config), config.loss)}


def learnt_from(rows: Sequence[Row], config: Any) -> list[Row]:
    """Return the rows that losses include."""
    return [row for row in rows if config.truncated != "mask" or row.finish != "length"]


def unscored_at_rest(rows: Sequence[Row]) -> Sequence[Row]:
    """Set the advantages of abstained rows to 0."""
    for row in rows:
        if row.reward is None:
            spread(row, 0.0)
    return rows


def over_greedy(files: Files, policy: Any, rows: Sequence[Row], config: Any) -> None:
    """Set ReMax's advantages: reward minus that of the greedy answer, which is decoded here."""
    tokenizer = AutoTokenizer.from_pretrained(files.start)
    for row in rows:
        prompt = row.tokens[: row.places[0]]
        said = list(prompt)
        while len(said) < len(prompt) + MAX_TOKENS and said[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                said.append(int(policy(torch.tensor([said]), use_cache=False).logits[0, -1].argmax()))
        answer = tokenizer.decode(said[len(prompt) :], skip_special_tokens=True).replace(" ", "")
        asked = tokenizer.decode(prompt, skip_special_tokens=True).replace(" ", "")
        baseline = score(asked, answer)
        if baseline is not None and said[-1] != tokenizer.eos_token_id:
            baseline -= config.missing_end_penalty
        known = row.reward is not None and baseline is not None
        spread(row, shaped(row, config) - baseline if known else 0.0)


def with_critics(files: Files, config: Any, rows: Sequence[Row], policy: Any) -> Trained:
    """Return the gradients of PPO or Safe RLHF: one critic or two, and the policy."""
    names = ("critic", "cost_critic") if config.name == "safe_rlhf" else ("critic",)
    learnt = learnt_from(rows, config)
    tokens = sum(len(row.places) for row in learnt)
    found: Trained = {}
    gains: dict[str, list[list[float]]] = {name: [] for name in names}
    for name in names:
        model = files.critic(name)
        for row in rows:
            hidden = model.model(torch.tensor([row.tokens]), use_cache=False).last_hidden_state[0]
            every = model.score(hidden)[:, 0]
            values = every[[place - 1 for place in row.places]]
            known = values.tolist()
            earned = earnings(row, config, name)
            if config.truncated == "bootstrap" and row.finish == "length":
                earned[-1] += config.gamma * float(every[-1].detach())
            advantages = estimates(earned, known, config.gamma, config.lam)
            if row.reward is None and name == "critic":
                advantages = [0.0] * len(known)
            gains[name].append(advantages)
            if row in learnt:
                targets = torch.tensor(advantages, dtype=torch.float64) + values.detach()
                ((values - targets).square().sum() / 2 / tokens).backward()
        found[name] = gradients_of(model)
    for index, row in enumerate(rows):
        row.advantages = gains["critic"][index]
        if config.name == "safe_rlhf":
            price = files.price()
            both = zip(row.advantages, gains["cost_critic"][index], strict=True)
            row.advantages = [(gain - price * harm) / (1 + price) for gain, harm in both]
    if config.name == "ppo":
        whiten(rows)
    return {**found, "policy": gradient(policy, learnt, config.loss)}


def earnings(row: Row, config: Any, critic: str) -> list[float]:
    """Return the rewards of a row's tokens; with costs, reward and cost each carry half of the divergence."""
    share = 0.5 if config.name == "safe_rlhf" else 1.0
    prices = [share * each for each in spent(row, config.loss)]
    if critic == "cost_critic":
        return at_the_last(row.cost, prices)
    return at_the_last(ended(row, config), [-each for each in prices])
