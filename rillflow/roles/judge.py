"""The judge: a language model that compares pairs of answers or rates single answers.

    pairs ─ questions, in both orders or in one drawn by the seed ─ update ─> metrics     loss on the label
    rollouts ─ groups of one prompt ─┬─ every two, or winner against next ─ both orders ─> p(i beats j) ─┐
                                     └─ each alone ──────────────────────> expected rating ──────────────┴─>

An answer's reward is its mean probability to win against the others. A comparison closer to a tie than
``abstain`` does not count. An answer without a counted comparison abstains; its reward is not 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from rillflow.errors import ModelError, RewardError
from rillflow.formulas.counter import uniform
from rillflow.formulas.judging import Preferences, both_orders, expected_rating, label_shares
from rillflow.graph.loss import only_term
from rillflow.models.language_model import LanguageModel
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.metrics import Mean, Metric, mean_of
from rillflow.records.rollout import completions
from rillflow.rewards.config import JudgeConfig
from rillflow.rewards.judge_prompt import KEPT, FrameConfig, kept_frame, no_frame
from rillflow.rewards.outcome import Outcome, Score
from rillflow.roles.comparisons import Question, Questioner, Standings, prompt_text
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.reward import SCORE_FIELDS, require_readable, reward_metrics, scored_rows
from rillflow.roles.setting import RoleSetting
from rillflow.roles.trained_role import TrainedRole, Training
from rillflow.training.config import PassesConfig
from rillflow.training.loss import loss_of
from rillflow.training.minibatches import gathered, prompt_units
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import GROUPS, SPLIT_PAIRS_REDUCE

JUDGED = ("contradicted", "bias", "ties")
"""Fields in addition to a score: the share of a row's comparisons that contradict themselves, the mean bias
towards the answer that is shown first, and the share of ties; NaN if there was no comparison.
"""
MODEL_OUTPUTS = ("logprobs", "likeliest")
"""Inputs of a label loss."""


def judge_metrics(scores: Batch) -> dict[str, Metric]:
    """Return the metrics of a reward, and how far the two orders of a comparison agree."""
    found = dict(reward_metrics(scores))
    names = {"contradicted": "contradiction/share", "bias": "position_bias/mean", "ties": "tie/share"}
    for name, called in names.items():
        values = scores.dense(name).double()
        if bool((~values.isnan()).any()):
            found[f"judge/{called}"] = mean_of(values[~values.isnan()])
    return found


class Judge(TrainedRole[LanguageModel]):
    """A language model that judges answers, and may be trained on pairs.

    Args:
        share: the model, or this rank's shard of it.
        training: settings of its training.
        frame: its question template; the model's directory keeps it.
        tokenizer: the policy's tokeniser, which wrote the judged rows; None for the judge's own.
        judging: which answers are compared, and what counts as a tie.

    Raises:
        ModelError: the tokeniser cannot read the frame, or a label is not a single token.
    """

    def __init__(
        self,
        share: ModelShard[LanguageModel],
        training: Training,
        *,
        frame: FrameConfig,
        tokenizer: Tokenizer | None = None,
        judging: JudgeConfig | None = None,
    ) -> None:
        super().__init__(share, training, name="judge")
        self._wrote, self._frame = tokenizer or share.model.tokenizer, frame
        self._how = judging or JudgeConfig(model="")
        self._questioner = Questioner(share.model.tokenizer, frame, share.model.context)
        setattr(share.model.module.config, KEPT, frame.model_dump(mode="json"))

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make a judge to train, or one that only scores, with the recipe's frame or its directory's."""
        model = setting.load(LanguageModel, "reward.judge.model")
        if setting.model is not None:
            assert setting.frame is not None, "an algorithm that trains a judge has a frame"
            return cls(setting.share(model), setting.training, frame=setting.frame)
        judging = setting.limits.judge
        assert judging is not None, "a recipe without a judge has no such role"
        frame = judging.frame or kept_frame(model.module.config.to_dict())
        if frame is None:
            raise no_frame(judging.model)
        share, wrote = setting.share(model), setting.tokenizer
        return cls(share, setting.training, frame=frame, tokenizer=wrote, judging=judging)

    @endpoint(SPLIT_PAIRS_REDUCE, reads=("tokens", "loss_mask", "columns"), model_outputs=MODEL_OUTPUTS)
    def update(
        self, /, pairs: Batch, loss: Any, passes: PassesConfig, orders: str = "both", **options: Any
    ) -> dict[str, Metric]:
        """Make optimiser steps over pairs of a better and a worse answer.

        Args:
            pairs: two rows per pair, one after the other, as ``tasks.prompts.answered_batch`` makes them.
            loss: a function of the label's log probability [N], such as ``formulas.label_loss``.
            passes: number of epochs and minibatches.
            orders: ``both`` shows each pair twice; ``random`` shows it once, in an order drawn by the seed.
            options: further arguments of the loss.

        Raises:
            TrainingError: a number is not finite.
            RewardError: no pair fits, or the judge's tokeniser reads none.
        """
        rows, left = self._lessons(pairs, orders)
        term = only_term("judge.update", loss, options)
        made = loss_of(term, MODEL_OUTPUTS, "judge")
        return self._learn(rows, made, passes) | {"judge/left_out/share": left}

    @endpoint(
        GROUPS,
        reads=("tokens", "loss_mask", "columns"),
        writes=(*SCORE_FIELDS, *JUDGED),
        measures=judge_metrics,
    )
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout: among the others of its prompt, or alone, as the frame requires.

        Returns:
            The fields of ``Reward.score`` and ``JUDGED`` [B] float32. A reward is the mean probability to win
            against the compared answers, or the expected rating. A row that cannot be read is an error; a row
            without a comparison, or with ties only, abstains.

        Raises:
            RewardError: a log probability is not finite, or no row can be read.
        """
        prompts, texts = self._texts(rollouts)
        why = [self._reason(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        require_readable("judge", why)
        readable = [place for place, reason in enumerate(why) if not reason]
        if self._frame.compares:
            groups = gathered(readable, prompt_units(rollouts))
            table = Standings(len(texts), self._how.abstain)
            if self._how.compare == "tournament":
                self._tournaments(groups, prompts, texts, table)
            else:
                pairs = [(i, j) for group in groups for n, i in enumerate(group) for j in group[n + 1 :]]
                table.add(pairs, self._preferences(pairs, prompts, texts))
            scores, extra = table.scores(), table.extra()
        else:
            scores, extra = self._ratings(readable, prompts, texts), Standings(len(texts), 0.0).extra()
        for place, reason in enumerate(why):
            if reason:
                scores[place] = Score(outcome=Outcome.ERROR, message=reason)
        return scored_rows(rollouts, texts, scores).with_fields(**extra)

    def compared(
        self, prompts: Sequence[str], one: Sequence[str], other: Sequence[str]
    ) -> tuple[list[int], Preferences]:
        """Compare pairs of texts, each in both orders.

        Args:
            prompts: N prompts.
            one: an answer to each.
            other: another answer to each.

        Returns:
            The places of the readable pairs, and their results: the probability that ``one`` is better.
        """
        whole = zip(prompts, one, other, strict=True)
        readable = [place for place, texts in enumerate(whole) if not self._reason(*texts)]
        asked = [prompts[place] for place in readable]
        texts = [*(one[place] for place in readable), *(other[place] for place in readable)]
        pairs = [(place, place + len(asked)) for place in range(len(asked))]
        return readable, self._preferences(pairs, asked, texts)

    def _texts(self, rollouts: Batch) -> tuple[list[str], list[str]]:
        answers = [self._wrote.decode(tokens) for tokens in completions(rollouts).lists()]
        return [*map(prompt_text, rollouts.ragged("columns").to_text())], answers

    def _reason(self, prompt: str, answer: str, other: str | None = None) -> str:
        """Return why an answer cannot be read; empty if it can."""
        shown = (answer, answer if other is None else other) if self._frame.compares else (answer,)
        try:
            self._questioner.encoded(Question(prompt=prompt, answers=shown))
        except ModelError as error:
            return f"{error.what}: {error.why}"
        return ""

    def _lessons(self, pairs: Batch, orders: str) -> tuple[Batch, Mean]:
        """Return rows to learn from, and the share of pairs left out because they cannot be read."""
        prompts, texts = self._texts(pairs)
        order = torch.argsort(prompt_units(pairs) * 2 + pairs.ids[:, 2]).tolist()
        found: list[list[int]] = []
        ids: list[list[int]] = []
        labels: list[int] = []
        drawn = uniform(self._seed ^ 0x4F52, pairs.ids, torch.zeros(len(pairs), dtype=torch.int64))
        left, reason = 0, ""
        for chosen, rejected in zip(order[0::2], order[1::2], strict=True):
            if reason := self._reason(prompts[chosen], texts[chosen], texts[rejected]):
                left += 1
                continue
            swapped = [False, True] if orders == "both" else [bool(drawn[chosen] < 0.5)]
            for label in map(int, swapped):
                shown = (texts[chosen], texts[rejected])[:: -1 if label else 1]
                found.append(self._questioner.encoded(Question(prompt=prompts[chosen], answers=shown)))
                ids.append([*pairs.ids[chosen, :2].tolist(), label])
                labels.append(label)
        counts = self.share.groups.dp.gather(torch.tensor([len(found)]))
        if not any(map(int, counts)):  # a rank has no pair if there are fewer pairs than ranks
            raise RewardError(
                f"the judge can read none of {len(order) // 2} pairs; the last: {reason}",
                why="no pair is left to train on",
                fix="use a judge with a longer context, or a tokeniser that has the characters of the data",
            )
        rows = self._questioner.labelled(found, labels, torch.tensor(ids, dtype=torch.int64).view(-1, 3))
        return rows, Mean(total=float(left), count=float(len(order) // 2))

    def _shares(self, questions: Sequence[Question]) -> Tensor:
        """Return [N, K] float64, the labels' shares; each dp rank scores some of the questions."""
        ranks, count = self.share.groups.dp, len(self._questioner.labels)
        own = range(ranks.rank, len(questions), ranks.size)
        asked = [self._questioner.encoded(questions[place]) for place in own]
        ids = torch.tensor(
            [[0, place, label] for place in range(len(asked)) for label in range(count)], dtype=torch.int64
        ).view(-1, 3)
        labels = [*range(count)] * len(asked)
        rows = self._questioner.labelled([each for each in asked for _ in range(count)], labels, ids)
        logprobs = self._scorer.logprobs(rows).sums().view(-1, count)
        found = torch.zeros(len(questions), count)
        for rank, part in enumerate(ranks.gather(logprobs)):
            found[rank :: ranks.size] = part
        if not bool(found.isfinite().all()):
            raise RewardError(
                "a log probability of the judge is not finite",
                why="a reward from it would not be finite either",
                fix="look for non-finite weights in the judge",
            )
        return label_shares(found)

    def _preferences(
        self, pairs: Sequence[tuple[int, int]], prompts: Sequence[str], texts: Sequence[str]
    ) -> Preferences:
        """Return the preferences between pairs of rows, each read in both orders."""
        one = [Question(prompt=prompts[i], answers=(texts[i], texts[j])) for i, j in pairs]
        other = [Question(prompt=prompts[i], answers=(texts[j], texts[i])) for i, j in pairs]
        first = self._shares([*one, *other])[:, 0]
        return both_orders(first[: len(pairs)], first[len(pairs) :])

    def _tournaments(
        self, groups: Sequence[Sequence[int]], prompts: Sequence[str], texts: Sequence[str], table: Standings
    ) -> None:
        """Compare each group's winner so far with the next answer; a tie keeps the winner."""
        holders = [group[0] for group in groups]
        for turn in range(1, max(map(len, groups), default=1)):
            there = [place for place, group in enumerate(groups) if len(group) > turn]
            pairs = [(holders[place], groups[place][turn]) for place in there]
            found = self._preferences(pairs, prompts, texts)
            table.add(pairs, found)
            for place, pair, likely in zip(there, pairs, found.likely.tolist(), strict=True):
                holders[place] = pair[likely < 0.5]

    def _ratings(self, readable: Sequence[int], prompts: Sequence[str], texts: Sequence[str]) -> list[Score]:
        questions = [Question(prompt=prompts[place], answers=(texts[place],)) for place in readable]
        found = expected_rating(self._shares(questions), self._frame.ratings).tolist()
        scores = [Score(outcome=Outcome.ABSTAIN)] * len(texts)
        for place, value in zip(readable, found, strict=True):
            scores[place] = Score(outcome=Outcome.SCORE, value=value)
        return scores
