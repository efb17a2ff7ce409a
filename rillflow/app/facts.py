"""Facts: read what a recipe's files say, each file once, for the checks, the build and the planner.

    Resolved ─ Facts ─┬─ [task] ────────────────────> task ───────────┬─> encoded ─> longest
                      ├─ policy.model ──────────────> model_input ────┘
                      │                               source, adapter, sizes, outline
                      ├─ [critic], [reward], [cost] > critic, scorers, functions, costs
                      └─ [rollout] ─────────────────> engine

Imports torch only for ``outline`` and ``engine``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.algorithms.config import SampledConfig
from rillflow.app.encoding import EncodedTask, encode_task, is_judged, longest_row
from rillflow.app.model_files import ALIKE, ModelSizes, sizes_from, sizes_of_directory, sizes_of_new
from rillflow.app.plugins import service
from rillflow.app.resolved import Resolved
from rillflow.app.scorers import scorer
from rillflow.app.sections import Recipe
from rillflow.app.standing import NOTHING_TO_STAND_ON, StandsOn
from rillflow.app.trained import named_model
from rillflow.errors import ConfigError, DataError, ModelError, RewardError
from rillflow.models.adapter_tokenizer import require_fits_base, tokenizer_source
from rillflow.models.bare import character_tokenizer
from rillflow.models.config import AdapterConfig, ModelConfig
from rillflow.models.directory_checks import end_tokens, settings_in
from rillflow.models.load_tokenizer import load_tokenizer
from rillflow.models.locate import base_of, found_adapter, locate
from rillflow.models.tokenizer import ModelInput, Tokenizer
from rillflow.rewards.function import FunctionPath, parse_files
from rillflow.rewards.judge_prompt import KEPT, no_frame
from rillflow.tasks.example import shown
from rillflow.tasks.files import Rows
from rillflow.tasks.task import Task, open_task, read_sets

if TYPE_CHECKING:
    from rillflow.models.language_model import LanguageModel
    from rillflow.rollout.engine import Engine
    from rillflow.workers.backend import Backend

JUDGE = "reward.judge.model"
"""Setting that names a judge."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Rows, rewards and ranks that a Python program passes in place of the recipe's."""

    rows: Rows | None = None
    """Prompts, or rows as in a file."""
    reward: tuple[FunctionPath, ...] = ()
    """Reward functions with their source text; their weighted sum is the reward."""
    backend: Callable[[float], Backend] | None = None
    """Makes the backend from the longest wait in seconds, such as a simulated one; None for the recipe's."""


NOTHING = Given()


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """A recipe and what its files say; each fact is read on first use, which raises its errors, and cached.

    Example:
        RecipeFacts(resolved=load_recipe(Path("run.toml"))).sizes
    """

    resolved: Resolved
    """The recipe."""
    given: Given = NOTHING
    """Rows and rewards that are Python objects instead of files."""
    standing: StandsOn = NOTHING_TO_STAND_ON
    """The models that the recipe's run stands on, whose places the recipe has."""
    drawn: int | None = None
    """Number of rows that held-out rows are drawn from, if a run resumes; see ``open_task``."""
    runs_code: bool = True
    """Whether code that the recipe names may run: to list rows of its own, and to be tried."""
    say: Callable[[str], None] | None = None
    """Callback for encoding progress. A run sets it, and loads its tokeniser with torch; None reads
    tokenizer.json directly."""

    @property
    def recipe(self) -> Recipe:
        """The settings."""
        return self.resolved.recipe

    @property
    def base(self) -> Path:
        """The recipe's folder; its paths are relative to it."""
        return self.resolved.base

    @property
    def generates(self) -> bool:
        """Whether the policy writes answers: those that it trains on, or those that an evaluation scores."""
        trains = isinstance(self.recipe.algorithm, SampledConfig)
        return self.resolved.generates and (trains or is_judged(self.resolved, self.task))

    @cached_property
    def task(self) -> Task:
        """The rows, of the kind of data that the algorithm trains on.

        Raises:
            DataError: the source is unknown or its data cannot be used.
        """
        recipe, kind, rows = self.recipe, self.recipe.chosen.data, self.given.rows
        seed, base = recipe.run.seed, self.base
        for writer in self.resolved.writers.values() if rows is None else ():
            rows = writer.rows(self)
        is_exact = self.resolved.names_held_out
        task = open_task(
            recipe.task, kind, base=base, seed=seed, drawn=self.drawn, rows=rows, is_exact=is_exact
        )
        task = replace(task, sets=read_sets(recipe.evaluate.sets, recipe.task, base, kind))
        _require_numbers(task, recipe.algorithm.columns)
        return replace(task, reward=self.given.reward) if self.given.reward else task

    @cached_property
    def model(self) -> ModelConfig:
        """The section ``policy``'s model; for a run, the policy of its newest checkpoint.

        Raises:
            RunDirectoryError: the run has no checkpoint, or no policy.
        """
        model = self.recipe.policy.model
        return model.model_copy(update={"path": named_model(model.path, self.base, "policy")})

    @cached_property
    def source(self) -> str | None:
        """Directory or hub name of an existing model, or of an adapter's base; None for a new model.

        Raises:
            ModelError: there is no such model.
        """
        path = self.model.path
        return None if path is None else base_of(_existing("policy.model.path", path, self.base))

    @cached_property
    def tokenizer_directory(self) -> Path | None:
        """Directory of the model's tokeniser, an adapter's own or its base's; None as ``directory``.

        Raises:
            ModelError: an adapter has a part of a tokeniser.
        """
        if self.directory is None or self.model.path is None:
            return None
        return Path(tokenizer_source(_existing("policy.model.path", self.model.path, self.base)))

    @property
    def directory(self) -> Path | None:
        """Directory of the existing model; None for a new one, and for one of the hub."""
        return Path(self.source) if self.source is not None and Path(self.source).is_dir() else None

    @cached_property
    def adapter(self) -> AdapterConfig | None:
        """The adapter to train: the recipe's, or that of the directory it names."""
        config = self.model
        with suppress(ModelError):  # ``source`` raises it
            found = (
                None if config.path is None else found_adapter(locate(config.path, self.base), config.adapter)
            )
            return None if found is None else found.config
        return config.adapter

    @property
    def adapter_directory(self) -> Path | None:
        """Directory of an existing adapter; None if the recipe adds a new one, or trains all weights."""
        model = self.model
        found = None if model.path is None else found_adapter(locate(model.path, self.base), model.adapter)
        return None if found is None else found.directory

    @cached_property
    def kind(self) -> str | None:
        """The model's type; None if it is unknown until the model is loaded."""
        new, folder = self.recipe.policy.model.new, self.directory
        if new is not None or folder is None:
            return None if new is None else new.architecture
        return str(settings_in(folder / "config.json").get("model_type"))

    @property
    def is_alike(self) -> bool:
        """Whether the model's type has identical layers and standard attention; True if it is unknown."""
        return self.kind is None or self.kind in ALIKE

    @cached_property
    def outline(self) -> LanguageModel:
        """The model without its weights; its attention has been tried. This loads torch.

        Raises:
            ModelError: the model is missing or unsupported.
        """
        import torch

        from rillflow.models.language_model import LanguageModel, outline

        config, device = self.model, torch.device("cpu")
        return outline(LanguageModel, config, seed=0, device=device, base=self.base, section="policy.model")

    @cached_property
    def sizes(self) -> ModelSizes | None:
        """Sizes of the section ``policy``'s model; None if they are unknown until it is loaded.

        Raises:
            ModelError: its files cannot be read, or a new model is not supported.
        """
        new, folder = self.recipe.policy.model.new, self.directory
        if new is None:
            return None if folder is None else sizes_of_directory(folder)
        if self.is_alike:
            return sizes_of_new(new)
        module = self.outline.module  # such as a mixture of experts
        shapes = {name: weight.shape for name, weight in module.named_parameters()}
        return sizes_from(module.config.get_text_config().to_dict(), shapes)

    @cached_property
    def equal_files(self) -> set[tuple[str, Any, Any]]:
        """Pairs of files, here and on nodes, that were compared in this run."""
        return set()

    @cached_property
    def critic(self) -> str | None:
        """Directory or hub name that the critic starts from; None to start from the policy.

        Raises:
            ModelError: there is no such model.
        """
        path = named_model(self.recipe.critic.path, self.base, "critic", "reward_model", "policy")
        return None if path is None else _existing("critic.path", path, self.base)

    @cached_property
    def scorers(self) -> Mapping[str, str]:
        """Directories or hub names of the models that score, by setting; see ``scorer_source``."""
        judge = self.recipe.reward.judge
        has_frame = judge is not None and judge.frame is not None
        return {
            setting: judge_source(path, has_frame, self.base)
            if setting == JUDGE
            else scorer_source(setting, path, self.base)
            for setting, path in self.resolved.scorers.items()
        }

    @property
    def named(self) -> Mapping[str, str]:
        """Directories or hub names of the models that the sections critic, reward and cost name."""
        found = {setting.partition(".")[0]: source for setting, source in self.scorers.items()}
        return found if self.critic is None else {**found, "critic": self.critic}

    @cached_property
    def functions(self) -> Sequence[FunctionPath]:
        """The reward functions: the recipe's and those given in Python, or else the task's own.

        The own reward of what writes the rows comes first, and the others are added to it.

        Raises:
            RewardError: there is no such function, or two have one name.
            ConfigError: neither the recipe nor the task names one.
        """
        config = self.recipe.reward
        named = [self._scoring(text, weight) for text, weight in config.named.items()]
        own = [each.reward for each in self.resolved.writers.values() if each.reward is not None]
        if own:
            return _with_different_names([*own, *named, *self.given.reward])
        if named:
            return _with_different_names([*named, *self.given.reward])
        is_model = config.model is not None or config.judge is not None
        if not self.task.reward and not is_model and "reward" in self.resolved.called:
            raise ConfigError(
                "reward.function is missing",
                why=f"{self.task.name} has no scorer of its own",
                fix='write [reward] function = "reward.py:name"',
            )
        files = parse_files(config.files, self.base, "reward.files")
        return _with_different_names([replace(function, files=files) for function in self.task.reward])

    @property
    def named_functions(self) -> Sequence[FunctionPath]:
        """The reward functions without the own reward of what writes the rows."""
        own = [each.reward for each in self.resolved.writers.values()]
        return [each for each in self.functions if each not in own]

    @property
    def judge(self) -> FunctionPath | None:
        """The judge over HTTP; None if there is none."""
        judge = self.recipe.reward.judge
        is_remote = judge is not None and judge.url is not None
        return service("reward.judge", "reward.judge.url")(self.recipe.reward, judge) if is_remote else None

    @cached_property
    def costs(self) -> Sequence[FunctionPath]:
        """The function that computes a row's cost; empty if a model does, or if no cost is used.

        Raises:
            RewardError: there is no such function.
            ConfigError: the algorithm bounds a cost, and the recipe names neither function nor model.
        """
        recipe, text = self.recipe, self.recipe.cost.function
        if text is None and recipe.cost.model is None and "cost" in self.resolved.called:
            raise ConfigError(
                "cost.function and cost.model are not set",
                why=f"{recipe.algorithm.name} bounds a cost, so every row needs a cost",
                fix='write cost.function = "cost.py:name", relative to the recipe',
            )
        return [] if text is None or recipe.cost.model is not None else [self._scoring(text)]

    def _scoring(self, text: str, weight: float = 1.0) -> FunctionPath:
        files = parse_files(self.recipe.reward.files, self.base, "reward.files")
        function = scorer(text, self.base, self.recipe.reward)
        return replace(function, files=() if function.address else files, weight=weight)

    @cached_property
    def engine(self) -> type[Engine]:
        """Class of the rollout engine; ``can`` has its capabilities. This loads torch.

        Raises:
            ConfigError: it cannot be imported, or is not an engine.
        """
        from rillflow.app.engine_sources import engine_source
        from rillflow.rollout.engine import engine_class

        return engine_class(engine_source(self.recipe.rollout.engine).path)

    @cached_property
    def model_input(self) -> ModelInput | None:
        """The model's tokeniser and context, without its weights; None if only loading it shows them.

        Raises:
            ModelError: there is no tokeniser, or a file cannot be read.
        """
        new, as_written = self.recipe.policy.model.new, self.say is None
        if new is not None:
            return ModelInput(
                tokenizer=Tokenizer(character_tokenizer(new.alphabet, new.context)), context=new.context
            )
        folder = self.tokenizer_directory
        if folder is None or self.sizes is None or (as_written and not (folder / "tokenizer.json").is_file()):
            return None
        inner = load_tokenizer(str(folder), as_written=as_written, whole=False)
        tokenizer = Tokenizer(inner, stop_tokens=end_tokens(str(self.directory)))
        require_fits_base(tokenizer, str(folder), str(self.directory), self.sizes.vocabulary)
        return ModelInput(tokenizer=tokenizer, context=self.sizes.context)

    @cached_property
    def encoded(self) -> EncodedTask | None:
        """The rows as tokens; None if the model's tokeniser and context are not available."""
        if self.model_input is None:
            return None
        return encode_task(self.resolved, self.task, self.model_input, self.say)

    @cached_property
    def longest(self) -> int | None:
        """Tokens of the longest row, prompt and answer; None if the tokeniser is not available."""
        return None if self.encoded is None else longest_row(self.resolved, self.encoded)


def _require_numbers(task: Task, columns: Sequence[str]) -> None:
    """Refuse rows without a finite number in a column that the algorithm reads as a number."""
    for row, name in ((row, name) for row in (*task.train, *task.held_out) for name in columns):
        value = row.columns.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            has = f"has {shown(value)}" if name in row.columns else "is missing"
            raise DataError(
                f"the column {name!r} of {row} {has}",
                why=f"algorithm.{name} reads a finite number in every row",
                fix=f"write a number in every row (0 if unknown), or set algorithm.{name} = false",
            )


def _with_different_names(functions: Sequence[FunctionPath]) -> Sequence[FunctionPath]:
    names = [each.name for each in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RewardError(
            f"the rewards have the names {names}",
            why="metrics record each reward by its name",
            fix=f"rename one of the functions {twice!r}",
        )
    return functions


def judge_source(judge: str, has_frame: bool, base: Path) -> str:
    """Return the directory or hub name of a judge; for a run, its newest judge.

    Args:
        judge: the judge's directory, or a run.
        has_frame: whether the recipe has a frame for it.
        base: folder of relative paths.

    Raises:
        ModelError: there is no such model.
        RunDirectoryError: the run has no judge yet.
        ConfigError: neither the recipe nor the judge's directory has a frame.
    """
    source = scorer_source(JUDGE, judge, base, role="judge")
    settings = Path(base_of(source)) / "config.json"
    if not has_frame and settings.is_file() and KEPT not in json.loads(settings.read_bytes()):
        raise no_frame(judge)
    return source


def scorer_source(setting: str, path: str, base: Path, role: str = "reward_model") -> str:
    """Return the directory or hub name of a model that scores; for a run, the newest model of a role.

    Raises:
        ModelError: there is no such model.
        RunDirectoryError: the run has no model of this role yet.
    """
    return _existing(setting, named_model(path, base, role) or path, base)


def _existing(setting: str, path: str, base: Path) -> str:
    """Return the location of an existing model."""
    try:
        source = locate(path, base)
    except ModelError as error:
        if Path(path).exists():
            hint = f"paths are relative to the recipe's folder; use {Path(path).resolve()}"
            raise ModelError(error.what, why=error.why, fix=hint) from error
        raise
    model = base_of(source)
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ModelError(
            f"{setting} is {path!r}",
            why=f"{model} has no config.json",
            fix="name the directory of a Hugging Face model",
        )
    return source
