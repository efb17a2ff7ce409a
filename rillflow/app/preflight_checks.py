"""Looks: preflight checks of ``run`` and ``check``; they find everything that would stop a run.

    recipe ─┬─ data ────── rows, answers, room ─────────── from the disk
            ├─ models ──── files, headers, sizes, memory ─ from the disk
            ├─ step ────── a custom algorithm's ────────── traced
            ├─ machine ─── devices, cores
            └─ reward ──── called on two rows ──────────── in a child that can be killed
                  └─> Report: topics to read, notes to think about, problems that stop a run

Imports torch only for an algorithm that is not shipped, so it answers in 1 to 2 seconds. It writes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.corrections import correction_notes
from rillflow.app.doctor import available_memory, cuda_devices, device_memory, machine_memory
from rillflow.app.encoding import EncodedTask, encode_task, longest_row, read_model_input
from rillflow.app.memory import (
    ModelSizes,
    estimate,
    holds_whole,
    rank_lines,
    require_memory,
    require_row,
    sizes_of_directory,
    sizes_of_new,
)
from rillflow.app.meshes import unfit
from rillflow.app.model_files import ALIKE, kind_of, require_model_files
from rillflow.app.recipe import Recipe
from rillflow.app.sources import (
    NOTHING,
    Given,
    agent_function,
    cost_functions,
    critic_source,
    model_source,
    open_rows,
    reward_functions,
    scorer_sources,
)
from rillflow.config.problems import shown, together
from rillflow.errors import ConfigError, RewardError, RillflowError, nearest
from rillflow.models.directory_checks import require_ends
from rillflow.models.locate import base_of
from rillflow.models.probes import probe_tokenizer
from rillflow.models.tokenizer import require_rows
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath, Text, place_of
from rillflow.rewards.outcome import RETURNED, Outcome, Score
from rillflow.rewards.sandbox import SENTENCES, Level
from rillflow.rewards.text_execution import Setting, is_shut_in, text_uses
from rillflow.rewards.workers import RewardWorkers
from rillflow.rollout.config import NATIVE
from rillflow.runs.environment import usable_cores
from rillflow.runs.formatting import size
from rillflow.tasks.example import Example
from rillflow.tasks.task import Task

MOST_REPEATS = 100
"""Most times that a step may draw the same prompt; a higher number is taken for a typing error."""
GIVEN = ("base_url", "api_key")
"""Arguments that an agent receives in addition to its row's columns."""
_TRIED = 2
_PLACES = 3
_NO_END = (
    "the model names no end token and rollout.stop is empty: every answer has rollout.max_tokens = {:,} "
    "tokens. Set eos_token in tokenizer_config.json or eos_token_id in generation_config.json, or name a "
    "text in rollout.stop"
)


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One subject of a report."""

    title: str
    """Name of the subject."""
    lines: Sequence[str]
    """Facts about the subject."""


@dataclass(kw_only=True)
class Report:
    """Results of the checks."""

    topics: list[Topic] = field(default_factory=list)
    """Facts by subject."""
    notes: list[str] = field(default_factory=list)
    """Behaviour of the run that its author may not expect."""
    problems: list[RillflowError] = field(default_factory=list)
    """Errors that would stop a run."""
    task: Task | None = None
    """The rows, if they could be read."""
    encoded: EncodedTask | None = None
    """The rows as tokens, if the model's tokeniser and context are available."""
    sizes: ModelSizes | None = None
    """Sizes of the section ``policy``'s model, if its files are available."""

    @property
    def rows(self) -> Task:
        """The rows of a recipe without a problem."""
        assert self.task is not None, "a recipe without rows is not sound"
        return self.task

    def say(self, title: str, lines: Sequence[str]) -> None:
        """Add a topic."""
        self.topics.append(Topic(title=title, lines=lines))

    def add(self, title: str, lines: Sequence[str]) -> None:
        """Add lines to the topic with this title."""
        place = next(place for place, topic in enumerate(self.topics) if topic.title == title)
        self.topics[place] = Topic(title=title, lines=[*self.topics[place].lines, *lines])

    def attempt(self, look: Callable[[], object]) -> None:
        """Run one check; its error becomes a problem, so that the next check still runs."""
        try:
            look()
        except RillflowError as error:
            self.problems.append(error)


def look(
    recipe: Recipe,
    base: Path,
    report: Report,
    say: Callable[[str], None] | None = None,
    *,
    drawn: int | None = None,
    given: Given = NOTHING,
    runs_code: bool = True,
) -> None:
    """Run all checks of a recipe and add their results to a report.

    Args:
        recipe: the checked settings.
        base: its folder.
        report: the report to add to.
        say: receives encoding progress; a run gives it, needs torch anyway, and uses its own tokeniser.
            None reads tokenizer.json directly.
        drawn: number of rows that held-out rows are drawn from, if a run resumes; see ``open_task``.
        given: rows and rewards that are Python objects instead of files.
        runs_code: whether to run the engine, the server's Python and the functions that the recipe names.
    """
    report.attempt(lambda: _look_at_step(recipe, report))
    if runs_code:
        report.attempt(lambda: _look_at_engine(recipe, base, report))
    report.notes += correction_notes(recipe)
    report.notes += _unreachable(recipe)
    report.attempt(lambda: _look_at_data(recipe, base, report, drawn, given))
    report.attempt(lambda: _look_at_model(recipe, base, report))
    if not report.problems:
        report.attempt(lambda: _look_at_tokens(recipe, base, report, say))
        report.attempt(lambda: _look_at_memory(recipe, report))
    report.attempt(lambda: _look_at_scorers(recipe, base, report))
    report.attempt(lambda: _look_at_machine(recipe, report))
    if not runs_code:
        report.attempt(lambda: _read_agent(recipe, base, report))
        report.attempt(lambda: _say_left_out(recipe, base, report))
        return
    report.attempt(lambda: _look_at_agent(recipe, base, report))
    report.attempt(lambda: _look_at_functions(reward_functions(recipe, base, report.task), recipe, report))
    report.attempt(lambda: _look_at_functions(cost_functions(recipe, base), recipe, report))


def _say_left_out(recipe: Recipe, base: Path, report: Report) -> None:
    """Report the code that the recipe would run; files are parsed, not imported."""
    agent = agent_function(recipe, base)
    rollout = recipe.rollout
    named = {
        "rollout.engine": rollout.engine if recipe.has_policy and rollout.engine != NATIVE else None,
        "rollout.server": rollout.server,
        "reward": ", ".join(map(str, reward_functions(recipe, base, report.task))),
        "cost": ", ".join(map(str, cost_functions(recipe, base))),
        "rollout.agent": agent and str(agent),
    }
    lines = [f"{setting}: {what}" for setting, what in named.items() if what]
    report.say("not run (--no-code)", lines or ["the recipe names no code"])


def _look_at_engine(recipe: Recipe, base: Path, report: Report) -> None:
    """Import an engine other than the native one, and check it."""
    if recipe.has_policy and recipe.rollout.engine != NATIVE:
        from rillflow.app.engines import engine_notes

        report.notes += engine_notes(recipe, base)


def _look_at_step(recipe: Recipe, report: Report) -> None:
    """Trace a custom algorithm's step; its file has usually loaded torch already."""
    if recipe.chosen in ALGORITHMS.values():
        return
    from rillflow.app.graphs import graphs, unpublished

    report.notes += filter(None, map(unpublished, graphs(recipe)))


def _unreachable(recipe: Recipe) -> list[str]:
    """Note a cost multiplier whose target is only reachable with negative costs."""
    settings = recipe.algorithm.model_dump()
    if not settings.keys() >= {"cost_limit", "cost_margin"}:
        return []
    limit, margin = settings["cost_limit"], settings["cost_margin"]
    if not 0 < margin >= limit:
        return []
    return [
        f"algorithm.cost_margin is {margin:g} and algorithm.cost_limit {limit:g}: the multiplier aims at a "
        f"mean cost of {limit - margin:g}, and grows to its highest where no cost is negative"
    ]


def require_sound(
    recipe: Recipe,
    base: Path,
    say: Callable[[str], None],
    *,
    drawn: int | None = None,
    given: Given = NOTHING,
) -> Report:
    """Return the report of a recipe that can run, with its rows; see ``look``.

    Raises:
        RillflowError: the one problem, or a ConfigError that lists all of them.
    """
    report = Report()
    look(recipe, base, report, say, drawn=drawn, given=given)
    if report.problems:
        raise together(report.problems, "the recipe")
    return report


def _look_at_data(recipe: Recipe, base: Path, report: Report, drawn: int | None, given: Given) -> None:
    task = report.task = open_rows(recipe, base, drawn, given)
    report.say("data", _data_lines(recipe, task, report))
    report.attempt(lambda: _require_few_repeats(recipe, task))


def _look_at_tokens(recipe: Recipe, base: Path, report: Report, say: Callable[[str], None] | None) -> None:
    """Encode every row, and check that it fits."""
    if report.task is None:
        return
    source = model_source(recipe, base)
    if source is not None and Path(source).is_dir():
        probe_tokenizer(Path(source), [row.key for row in (*report.task.train, *report.task.held_out)])
    model_input = read_model_input(recipe, base, as_written=say is None)
    if model_input is None:
        return
    if report.sizes is not None:
        require_rows(model_input.tokenizer, report.sizes.vocabulary)
        if recipe.has_policy:
            require_ends(model_input.tokenizer.stop_tokens, report.sizes.vocabulary)
    if recipe.has_policy and not model_input.tokenizer.stop_tokens and not recipe.rollout.stop:
        report.notes.append(_NO_END.format(recipe.rollout.max_tokens))
    encoded = report.encoded = encode_task(recipe, report.task, model_input, say)
    report.problems += encoded.problems
    report.notes += encoded.notes
    longest = max(encoded.train[recipe.chosen.data], key=lambda row: len(row.prompt) if row else 0)
    if longest is not None:
        room = f" and rollout.max_tokens = {recipe.rollout.max_tokens:,}" if recipe.has_policy else ""
        told = f"longest prompt: {len(longest.prompt):,} tokens{room} of {model_input.context:,}"
        report.say("tokens", [f"{told}: {longest.example}"])
        if report.sizes is not None and recipe.has_policy:
            require_row(recipe, report.sizes, len(longest.prompt))


def _require_few_repeats(recipe: Recipe, task: Task) -> None:
    drawn, there = recipe.algorithm.prompts_per_step, len(task.train)
    if drawn > MOST_REPEATS * there:
        raise ConfigError(
            f"algorithm.prompts_per_step is {drawn:,} and {task.name} has {there:,} prompts",
            why=f"one step would draw every prompt {drawn // there:,} times",
            fix=f"at most {there:,}; algorithm.samples_per_prompt is how many answers a prompt gets",
        )


def _data_lines(recipe: Recipe, task: Task, report: Report) -> list[str]:
    judged = min(recipe.evaluate.problems, len(task.held_out))
    word = "prompts" if recipe.has_policy else "pairs"
    temperature = recipe.evaluate.temperature
    how = f", answered at temperature {temperature:g}" if recipe.has_policy else ""
    prompts = recipe.algorithm.steps * recipe.algorithm.prompts_per_step
    if recipe.algorithm.prompts_per_step > len(task.train):
        report.notes.append(
            f"a step draws {recipe.algorithm.prompts_per_step:,} {word} and there are {len(task.train):,}: "
            f"within a step, {word} repeat"
        )
    sets = [
        f"the set {name} ({min(recipe.evaluate.problems, len(rows)):,})" for name, rows in task.sets.items()
    ]
    if not judged and recipe.evaluate.problems:
        rest = f"only {' and '.join(sets)} will be evaluated" if sets else "nothing will be evaluated"
        report.notes.append(f"nothing is held out, so {rest}")
    elif judged < recipe.evaluate.problems:
        report.notes.append(
            f"of evaluate.problems = {recipe.evaluate.problems:,} only {judged:,} are held out"
        )
    if task.shared_prompts:
        report.notes.append(
            f"{task.shared_prompts:,} rows to train on have the prompt of a held-out row and differ from it "
            "in another column: they are trained on"
        )
    counts = [f"{judged:,} {word}", *sets] if judged else sets
    is_judged = bool(counts) and recipe.evaluate.problems > 0
    return [
        f"{task.name}: {len(task.train):,} {word} to train on, {len(task.held_out):,} held out, "
        f"{task.left_out:,} left out because they are among those",
        f"the algorithm draws {prompts:,} {word}: {prompts / len(task.train):.1f} passes over them",
        f"judged by {', '.join(counts)}{how}" if is_judged else "never evaluated",
    ]


def _look_at_model(recipe: Recipe, base: Path, report: Report) -> None:
    new, source = recipe.policy.model.new, model_source(recipe, base)
    name = f"a new {new.architecture}" if new is not None else str(source)
    sizes = sizes_of_new(new) if new is not None else None
    if source is not None and Path(source).is_dir():
        require_model_files(Path(source), is_chat=_has_chat(report.task))
        sizes = sizes_of_directory(Path(source))
    report.sizes = sizes
    kind = new.architecture if new is not None else kind_of(source)
    if kind is not None and kind not in ALIKE:
        from rillflow.app.attention_trial import decoder_notes

        report.notes += decoder_notes(recipe, base)
    if sizes is None:
        report.say("model", [f"{name}: its size is known when it is loaded"])
        return
    if recipe.has_policy and recipe.rollout.max_tokens >= sizes.context:
        raise ConfigError(
            f"rollout.max_tokens is {recipe.rollout.max_tokens} and the model's context is {sizes.context}",
            why="the context holds prompt and answer",
            fix=f"fewer than {sizes.context}",
        )
    placement = recipe.placement
    for problem in unfit(
        placement.mesh_of("policy"), placement.generate_tp, sizes.heads, sizes.kv_heads, sizes.layers
    ):
        raise problem
    report.say("model", [f"{name}: {sizes.parameters:,} parameters, context {sizes.context:,} tokens"])


def _look_at_memory(recipe: Recipe, report: Report) -> None:
    """Check a rank's memory for the longest row that the data and the settings allow."""
    sizes, encoded = report.sizes, report.encoded
    if sizes is None or encoded is None:
        return
    longest = longest_row(recipe, encoded)
    found = estimate(recipe, sizes, longest)
    report.add("model", [f"memory: {found.text}", *rank_lines(recipe, sizes, longest)])
    if not holds_whole(recipe) or recipe.placement.address is not None:
        return
    device = device_memory(recipe.run.device)
    if device is not None:
        require_memory(recipe, sizes, longest, device, f"the device {recipe.run.device!r}")
        return
    there, free = machine_memory(), available_memory()
    if there is not None:
        require_memory(recipe, sizes, longest, there, "this machine")
    if free is not None and found.total > free and not recipe.run.device.startswith("cuda"):
        report.notes.append(f"about {size(found.total)} are needed and {size(free)} are free in main memory")


def _has_chat(task: Task | None) -> bool:
    """Return whether a prompt is a conversation, which a model without a chat template cannot read."""
    return task is not None and any(not isinstance(row.prompt, str) for row in (*task.train, *task.held_out))


def _look_at_scorers(recipe: Recipe, base: Path, report: Report) -> None:
    start = critic_source(recipe, base)
    sources = scorer_sources(recipe, base) | ({} if start is None else {"critic.path": start})
    for setting, source in sources.items():
        report.say(setting, [source])
        model = Path(base_of(source))
        if model.is_dir():
            require_model_files(model, is_chat=False)


def _look_at_machine(recipe: Recipe, report: Report) -> None:
    device, there = recipe.run.device, cuda_devices()
    if device.startswith("cuda") and there is not None and recipe.placement.address is None:
        number = int(device.removeprefix("cuda").removeprefix(":") or 0)
        if number >= there:
            names = ["cpu", *(f"cuda:{index}" for index in range(there))]
            raise ConfigError(
                f"there is no device {device!r}",
                why=f"this machine has {', '.join(names)}",
                fix=f"{nearest(device, ['auto', *names])}; rillflow doctor says what torch sees",
            )
    threads, cores = recipe.run.threads, usable_cores()
    if threads > cores:
        report.notes.append(
            f"run.threads is {threads} and there are {cores:g} cores: more threads wait for each other"
        )


def _read_agent(recipe: Recipe, base: Path, report: Report) -> None:
    """Read an agent's source where no code of the recipe may run."""
    function = agent_function(recipe, base)
    if function is not None and recipe.rollout.agent is not None:
        setting = recipe.rollout.agent.sandbox
        is_shut_in(function, setting)
        report.notes += _execution_notes(function, "rollout.agent.sandbox", setting, level=None)


def _look_at_agent(recipe: Recipe, base: Path, report: Report) -> None:
    """Load an agent in a child process, and check that each row has the columns it needs."""
    agent, function = recipe.rollout.agent, agent_function(recipe, base)
    if agent is None or function is None or report.task is None:
        return
    held = RewardConfig(workers=1, memory_bytes=agent.memory_bytes, sandbox=agent.sandbox)
    with RewardWorkers(function, held) as workers:
        required = workers.load().required
        report.notes += _execution_notes(function, "rollout.agent.sandbox", agent.sandbox, workers.level)
    task = report.task
    rows = [*task.train, *task.held_out, *(row for rows in task.sets.values() for row in rows)]
    for name, row in ((name, row) for name in required if name not in GIVEN for row in rows):
        columns = {"prompt", *row.columns}
        if name not in columns:
            known = sorted({*columns, *GIVEN})
            raise RewardError(
                f"{place_of(function)}: the agent {function.name} needs {name!r}",
                why=f"{row} gives it {', '.join(known)}",
                fix=f"{nearest(name, known)}; or give the parameter a default",
            )


def _execution_notes(function: FunctionPath, name: str, setting: Setting, level: Level | None) -> list[str]:
    """Return notes on a function that runs text, and its sandbox level; empty if it runs none."""
    uses = text_uses(function)
    if not uses and setting != "auto":
        return [f"{function} has {name} = {shown(setting)}"] if setting else []
    if not uses:
        return []
    places = ", ".join(map(str, uses[:_PLACES])) + (", ..." if len(uses) > _PLACES else "")
    held = "in a sandbox" if level is None else f"{level}: {SENTENCES[level]}"
    if not setting:
        held = f"{Level.NONE}: {SENTENCES[Level.NONE]}"
    said = [f"{function} runs text or starts processes ({places}); {name} = {shown(setting)}; {held}"]
    if setting is True and any(use.is_in_process for use in uses):
        said.append(f"{function} runs text in its own process: an answer can set its own row's result")
    return said


def _look_at_functions(functions: Sequence[FunctionPath], recipe: Recipe, report: Report) -> None:
    """Call each function on two rows and their own answers, in a child process as in a run."""
    if report.task is None or not recipe.has_policy:
        return
    answered = [row for row in report.task.train if row.completion is not None]
    for function in functions:
        _look_at_function(function, recipe, report, (answered or report.task.train)[:_TRIED])


def _look_at_function(
    function: FunctionPath, recipe: Recipe, report: Report, rows: Sequence[Example]
) -> None:
    answers = [row.completion or "" for row in rows]
    scores, level = _tried(function, recipe, rows, answers)
    report.notes += _execution_notes(function, "reward.sandbox", recipe.reward.sandbox, level)
    report.say("reward", [f"{function}", *map(_scored, rows, answers, scores)])
    failed = [score for score in scores if score.outcome in (Outcome.TIMEOUT, Outcome.ERROR)]
    if len(failed) > recipe.reward.max_failures * len(scores):
        raise RewardError(
            f"{function} failed on {len(failed)} of the {len(scores)} rows it was tried on: "
            f"{failed[0].message}",
            why=f"a run stops where more than reward.max_failures = {recipe.reward.max_failures:g} fail",
            fix=f"mend {function.file}; if {recipe.reward.timeout_s:g} s are too few, raise reward.timeout_s",
        )
    if failed:
        report.notes.append(f"{function} failed on one of the rows it was tried on: {failed[0].message}")
    if all(score.outcome is Outcome.ABSTAIN for score in scores):
        report.notes.append(f"{function} gave no score (None) to any row it was tried on")


def _tried(
    function: FunctionPath, recipe: Recipe, rows: Sequence[Example], answers: list[str]
) -> tuple[list[Score], Level]:
    prompts: list[Text] = [row.prompt if isinstance(row.prompt, str) else list(row.prompt) for row in rows]
    replies: list[Text] = [
        answer if isinstance(row.prompt, str) else [{"role": "assistant", "content": answer}]
        for row, answer in zip(rows, answers, strict=True)
    ]
    names = sorted(set[str]().union(*(row.columns for row in rows)))
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    if recipe.rollout.agent is not None:
        columns[RETURNED] = list(answers)
    with RewardWorkers(function, recipe.reward.model_copy(update={"workers": 1})) as workers:
        scores = workers.score(prompts, replies, columns)
        return scores, workers.level


def _scored(row: Example, answer: str, score: Score) -> str:
    value = f"{score.value:g}" if score.value is not None else score.outcome
    return f"{shown(row.key)} answered with {shown(answer)}: {value}"
