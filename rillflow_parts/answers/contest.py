"""Contest: compare two models on held-out prompts by a judge, a reward model or a function.

    recipe ─> held-out prompts ─┬─ one:   tokeniser, engine ─> answers ─┐
                                └─ other: tokeniser, engine ─> answers ─┴─ compared ─> win rate, pairs

Each model reads prompts with its own tokeniser and template. Answers to a prompt are paired sample by sample.
A pair in which an answer has no score gets no verdict and counts as undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rillflow.app.evaluate import powers_of_two
from rillflow.app.facts import RecipeFacts, judge_source, scorer_source
from rillflow.app.plugin_sections import own_settings
from rillflow.app.resolved import Resolved
from rillflow.app.sections import Recipe
from rillflow.app.trained import model_directory
from rillflow.config.load import validate
from rillflow.errors import ConfigError, RewardError
from rillflow.formulas.judging import length_controlled, pass_at, win_rate
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import (
    LanguageModel,
    ScalarModel,
    choose_device,
    load_model,
    load_scalar_model,
)
from rillflow.records.batch import Batch
from rillflow.records.rollout import completions
from rillflow.records.row import HELD_OUT_EPOCH
from rillflow.rewards.config import JudgeConfig
from rillflow.rewards.judge_prompt import kept_frame
from rillflow.rewards.workers import WeightedWorkers
from rillflow.roles.comparisons import prompt_text
from rillflow.roles.judge import Judge
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.retokenize import OtherTokens
from rillflow.roles.reward import Reward
from rillflow.roles.scalar_roles import RewardModel
from rillflow.roles.trained_role import Training
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import native_engine
from rillflow.runs import layout
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.example import Example
from rillflow.tasks.prompts import prompt_batch


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Settings of a contest."""

    loaded: Resolved
    """Recipe with the held-out prompts and the reward function."""
    problems: int | None = None
    """Number of held-out prompts; None for all."""
    samples: int = 1
    """Answers of each model to one prompt."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy decoding."""
    judge: Path | None = None
    """Directory of a judge that compares answers, or the run that trained it."""
    reward_model: Path | None = None
    """Directory of a reward model that scores each answer, or the run that trained it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One model's answers, with rows ordered by prompt and sample."""

    source: str
    """Run or model directory."""
    rollouts: Batch
    """Rows of the answers."""
    model: LanguageModel
    """Model that answered."""
    texts: Sequence[str]
    """Answers as text."""

    @property
    def mean_length(self) -> float:
        """Mean number of tokens of an answer."""
        return float(self.rollouts.ragged("loss_mask").sums().double().mean())


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Results of comparing pairs of answers, in the order of the pairs."""

    outcomes: Sequence[float | None]
    """1 if the first answer is better, 0.5 for a tie, 0 if the second is; None if undecided."""
    scores: tuple[Sequence[float | None], Sequence[float | None]]
    """Score of each answer; for a judge, the probability that it is the better one."""
    more: dict[str, float] = field(default_factory=dict)
    """A judge's contradiction rate and position bias."""


def contest(first: Path, second: Path | None, asking: Asking) -> dict[str, Any]:
    """Run a contest and return its result as JSON; docs/cli.md lists the fields.

    Args:
        first: a run, or the directory of a causal language model.
        second: the model to compare with; None to score the first alone.
        asking: the contest's settings.

    Raises:
        ConfigError: no prompt is held out, no function scores, or a judge has only one model.
        RunDirectoryError, ModelError, DataError, RewardError: a run, model, task or function cannot be used.
    """
    recipe = asking.loaded.recipe
    facts = RecipeFacts(resolved=asking.loaded)
    task = facts.task
    examples = task.held_out[: asking.problems]
    if not examples:
        raise ConfigError(
            f"no prompt of {task.name} is held out",
            why="models are compared on prompts that they were not trained on",
            fix="give --recipe FILE of a recipe that sets task.held_out or task.held_out_source",
        )
    functions = facts.named_functions  # no environment plays here
    if asking.judge is None and asking.reward_model is None and not functions:
        raise ConfigError(
            f"no function scores answers to {task.name}",
            why="the recipe names no reward function, and the task has no default one",
            fix="give --judge DIR or --reward-model DIR",
        )
    if asking.judge is not None and second is None:
        raise ConfigError(
            "--judge also needs --against", why="a judge compares two answers", fix="add --against OTHER"
        )
    sides = [_answers(source, examples, asking) for source in (first, second) if source is not None]
    found: dict[str, Any] = {
        "prompts": len(examples),
        "samples": asking.samples,
        "by": _named(asking, functions),
    }
    with ExitStack() as stack:
        rewards: list[list[float | None]] = []
        if functions:
            workers = stack.enter_context(WeightedWorkers(functions, recipe.reward))
            rewards = [_by_function(side, workers, recipe) for side in sides]
        said = [_summary(each, asking.samples) for each in rewards] or [{}] * len(sides)
        lengths = [{"source": side.source, "mean_length": side.mean_length} for side in sides]
        found["models"] = [{**one, **other} for one, other in zip(lengths, said, strict=True)]
        if len(sides) == 2:
            one, other = sides
            if asking.judge is not None:
                verdicts = _by_judge(one, other, asking.judge, recipe)
            elif asking.reward_model is not None:
                model = _reward_model(asking.reward_model, recipe)
                verdicts = _by_scores(_by_model(one, model, recipe), _by_model(other, model, recipe))
            else:
                verdicts = _by_scores(*rewards)
            found |= _compared(one, other, verdicts, asking.samples)
    return found


def _answers(source: Path, examples: Sequence[Example], asking: Asking) -> Side:
    """Sample one model's answers to prompts that its own tokeniser encodes."""
    recipe = asking.loaded.recipe
    folder = model_directory(source, "policy") if layout.is_run_directory(source) else source
    model = _language_model(folder, recipe)
    asked = {**own_settings(recipe.rollout, RolloutConfig).model_dump(), "temperature": asking.temperature}
    rollout = validate(RolloutConfig, asked, "the sampling settings")
    encoded = Encoder.of(model.tokenizer, recipe.task).rows(examples)
    prompts = prompt_batch(encoded, epoch=HELD_OUT_EPOCH)
    rollouts = native_engine(model, rollout, recipe.run.seed).generate(prompts, samples=asking.samples)
    texts = [model.tokenizer.decode(tokens) for tokens in completions(rollouts).lists()]
    return Side(source=str(source), rollouts=rollouts, model=model, texts=texts)


def _language_model(folder: Path, recipe: Recipe) -> LanguageModel:
    config = ModelConfig(path=str(folder.absolute()), dtype=recipe.policy.model.dtype)
    return load_model(config, seed=0, device=choose_device(recipe.run.device), base=Path())


def _values(scores: Batch) -> list[float | None]:
    """Return the rewards of rows; None for a row without one."""
    pairs = zip(scores.dense("rewards").tolist(), scores.dense("valid").tolist(), strict=True)
    return [value if is_valid else None for value, is_valid in pairs]


def _by_function(side: Side, workers: WeightedWorkers, recipe: Recipe) -> list[float | None]:
    role = Reward(workers, side.model.tokenizer, max_failures=recipe.reward.max_failures)
    return _values(role.score(side.rollouts))


def _reward_model(path: Path, recipe: Recipe) -> ScalarModel:
    source = scorer_source("--reward-model", str(path.absolute()), Path())
    config = ModelConfig(path=source, dtype=recipe.policy.model.dtype)
    return load_scalar_model(config, seed=0, device=choose_device(recipe.run.device), base=Path())


def _by_model(side: Side, model: ScalarModel, recipe: Recipe) -> list[float | None]:
    encoder = Encoder.of(model.tokenizer, recipe.task)
    reread = OtherTokens(wrote=side.model.tokenizer, encoder=encoder, context=model.context)
    role = RewardModel(
        ModelShard.whole(model),
        Training(config=recipe.policy.as_train(), seed=0),
        tokenizer=side.model.tokenizer,
        reread=reread,
    )
    return _values(role.score(side.rollouts))


def _by_scores(one: Sequence[float | None], other: Sequence[float | None]) -> Verdicts:
    outcomes = [
        None if a is None or b is None else 0.5 if a == b else float(a > b)
        for a, b in zip(one, other, strict=True)
    ]
    return Verdicts(outcomes=outcomes, scores=(one, other))


def _by_judge(one: Side, other: Side, path: Path, recipe: Recipe) -> Verdicts:
    own = recipe.reward.judge
    asked = JudgeConfig(model=str(path.absolute()), frame=None if own is None else own.frame)
    source = judge_source(str(path.absolute()), asked.frame is not None, Path())
    model = _language_model(Path(source), recipe)
    frame = asked.frame or kept_frame(model.module.config.to_dict())
    assert frame is not None, "judge_source checks the frame"
    if not frame.compares:
        raise ConfigError(
            f"--judge {path} rates single answers",
            why="its frame has {answer}; a contest compares two answers",
            fix="choose a judge whose frame has {first} and {second}",
        )
    training = Training(config=recipe.policy.as_train(), seed=0)
    judge = Judge(ModelShard.whole(model), training, frame=frame)
    prompts = [prompt_text(columns) for columns in one.rollouts.ragged("columns").to_text()]
    places, found = judge.compared(prompts, one.texts, other.texts)
    outcomes: list[float | None] = [None] * len(prompts)
    likely: list[float | None] = [None] * len(prompts)
    for place, value in zip(places, found.likely.tolist(), strict=True):
        likely[place] = value
        same = one.texts[place] == other.texts[place]
        outcomes[place] = 0.5 if same or value == 0.5 else float(value > 0.5)
    if not places:
        raise RewardError(
            f"the judge {path} can read none of {len(prompts)} pairs",
            why="its tokeniser cannot encode a character, or two answers exceed its context",
            fix="choose another judge",
        )
    more = {
        "contradiction": float(found.contradicts.double().mean()),
        "position_bias": float(found.bias.mean()),
    }
    against = [None if each is None else 1 - each for each in likely]
    return Verdicts(outcomes=outcomes, scores=(likely, against), more=more)


def _compared(one: Side, other: Side, verdicts: Verdicts, samples: int) -> dict[str, Any]:
    """Return the win rate, further numbers and the pairs."""
    said = [each for each in verdicts.outcomes if each is not None]
    lengths = [side.rollouts.ragged("loss_mask").sums().tolist() for side in (one, other)]
    prompts = [prompt_text(columns) for columns in one.rollouts.ragged("columns").to_text()]
    rows = list(zip(verdicts.outcomes, *lengths, strict=True))
    groups = [rows[start : start + samples] for start in range(0, len(rows), samples)]
    judged = [group for group in ([each for each in rows if each[0] is not None] for rows in groups) if group]
    outcomes = [fmean(float(each[0] or 0) for each in group) for group in judged]
    longer = [fmean(float(each[1] - each[2]) for each in group) for group in judged]
    found: dict[str, Any] = {
        "wins": said.count(1.0),
        "ties": said.count(0.5),
        "losses": said.count(0.0),
        "undecided": len(verdicts.outcomes) - len(said),
        **verdicts.more,
    }
    if outcomes:
        rate, interval = win_rate(outcomes)
        found |= {"win_rate": rate, "interval": list(interval)}
        found["length_controlled"] = length_controlled(outcomes, longer)
    found["pairs"] = [
        {"prompt": prompt, "one": a, "other": b, "outcome": outcome, "scores": list(scores)}
        for prompt, a, b, outcome, scores in zip(
            prompts,
            one.texts,
            other.texts,
            verdicts.outcomes,
            zip(*verdicts.scores, strict=True),
            strict=True,
        )
    ]
    return found


def _summary(values: Sequence[float | None], samples: int) -> dict[str, Any]:
    """Return the mean reward; for 0/1 rewards also pass@k, where a row without a score counts as wrong."""
    scored = [value for value in values if value is not None]
    found: dict[str, Any] = {"mean_reward": fmean(scored) if scored else None, "scored": len(scored)}
    if scored and set(scored) <= {0.0, 1.0}:
        groups = [values[start : start + samples] for start in range(0, len(values), samples)]
        right = [sum(value == 1.0 for value in group) for group in groups]
        for k in powers_of_two(samples):
            found[f"pass@{k}"] = fmean(pass_at(samples, count, k) for count in right)
    return found


def _named(asking: Asking, functions: Sequence[Any]) -> str:
    if asking.judge is not None:
        return f"judge {asking.judge}"
    return f"reward model {asking.reward_model}" if asking.reward_model else ", ".join(map(str, functions))
