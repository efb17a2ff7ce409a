"""Task: the rows that a run trains on, and the rows that evaluate it.

    source ─ made or read ─> examples ─ split by row ─┬─> train
    held_out_source ────────────────────────────────> └─> held_out

No row is in both: training rows that are also held out are removed from training, and counted. Two rows are
equal if their prompts and their other columns are equal, except the column ``id``, the answers of pairs and
the answers to learn from. Opening a task imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from rillflow.config.user_paths import expanded
from rillflow.errors import DataError, nearest
from rillflow.rewards.function import FunctionPath
from rillflow.tasks import arithmetic, gym
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.example import Example
from rillflow.tasks.files import Rows, given_rows, made_rows, read_rows, template_inputs
from rillflow.tasks.fingerprint import Fingerprint
from rillflow.tasks.huggingface import HUB, hub_rows, parse_source
from rillflow.tasks.kinds import ARITHMETIC, GYM, DataKind

LEFT_OUT = 10
"""If ``task.held_out`` is left out, at most one row of this many is held out."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts to train on and held-out prompts.

    Example:
        open_task(TaskConfig(size=100, held_out=10), PROMPTS, base=Path(), seed=0).train[0].prompt
    """

    name: str
    """Name of the source."""
    train: tuple[Example, ...]
    """Rows to train on."""
    held_out: tuple[Example, ...]
    """Rows for evaluation; drawn rows are in random order, so any first part of them is a random sample."""
    left_out: int
    """Training rows removed because the same row is held out."""
    shared_prompts: int
    """Training rows whose prompt is held out in a row with other columns."""
    reward: tuple[FunctionPath, ...]
    """Reward functions of the task, which are summed; empty if the recipe must name one."""
    fingerprint: Fingerprint
    """Digests by which a resumed run recognises its rows."""
    sets: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    """Further rows for evaluation, by name; their prompts may also be trained on."""

    @property
    def every_row(self) -> tuple[Example, ...]:
        """The rows to train on, the held-out ones and those of further sets."""
        return (*self.train, *self.held_out, *(row for rows in self.sets.values() for row in rows))

    @property
    def digest(self) -> str:
        """Digest that identifies the data."""
        return self.fingerprint.digest


def open_task(
    config: TaskConfig,
    kind: DataKind,
    *,
    base: Path,
    seed: int,
    drawn: int | None = None,
    rows: Rows | None = None,
    is_exact: bool = True,
) -> Task:
    """Generate or read a task's rows and hold some of them out.

    Args:
        config: the task section of the recipe.
        kind: the kind of data.
        base: folder of relative files.
        seed: determines generated problems, and the held-out rows.
        drawn: number of first rows of the source from which held-out rows are drawn; None: all. Rows added to
            a run's data later are only trained on, so the held-out rows stay the same.
        rows: rows given in Python, instead of the source.
        is_exact: whether ``task.held_out`` is a number that somebody chose; the default is at most a tenth.

    Raises:
        DataError: the source is unknown, its data is invalid, or it has no rows of this kind; no row is left
            to train on.
    """
    examples, reward = _rows(config, kind, base, seed, rows)
    if config.held_out_source is not None:
        held_out = tuple(_read("task.held_out_source", config.held_out_source, config, base, kind))
    else:
        held_out = _drawn(examples[:drawn], config, seed, is_exact=is_exact)
    names = examples[0].compared & held_out[0].compared if held_out else frozenset[str]()
    apart, prompts = {row.identity(names) for row in held_out}, {row.key for row in held_out}
    train = tuple(example for example in examples if example.identity(names) not in apart)
    if not train:
        raise DataError(
            f"no row of {config.source!r} is left to train on",
            why=f"all {len(examples)} rows are held out",
            fix="hold out fewer or other rows",
        )
    left_out = len(examples) - len(train) - (0 if config.held_out_source else len(held_out))
    return Task(
        name=config.source,
        train=train,
        held_out=held_out,
        left_out=left_out,
        shared_prompts=sum(row.key in prompts for row in train),
        reward=() if reward is None else (reward,),
        fingerprint=Fingerprint(
            drawn=len(examples) if drawn is None else drawn,
            examples=examples,
            apart=held_out if config.held_out_source else (),
        ),
    )


def read_sets(
    sets: Mapping[str, str], config: TaskConfig, base: Path, kind: DataKind
) -> dict[str, tuple[Example, ...]]:
    """Return the rows of evaluation files and data sets by name; columns are made as in the task.

    Raises:
        DataError: a file is invalid.
    """
    return {
        name: tuple(_read(f"evaluate.sets.{name}", source, config, base, kind))
        for name, source in sets.items()
    }


def _rows(
    config: TaskConfig, kind: DataKind, base: Path, seed: int, given: Rows | None
) -> tuple[Sequence[Example], FunctionPath | None]:
    """Return the source's rows, and its own reward function."""
    source = config.source
    if given is not None:
        return given_rows(given, kind.read, config.plan), None
    kind.require_source(source)
    if (config.columns or config.template) and (source == ARITHMETIC or source.startswith(GYM)):
        raise DataError(
            f"task.source is {source!r}, and task.columns or task.template is set",
            why="they make the columns of given data, and this source makes its own",
            fix="remove them, or write the problems into a file",
        )
    if source == ARITHMETIC:
        numbers, reward = {"size": config.size, "digits": config.digits}, arithmetic.REWARD
        problems = arithmetic.arithmetic_examples(**numbers, operators=config.operators, seed=seed)
    elif source.startswith(GYM):
        problems, reward = gym.gym_examples(source, size=config.size, seed=seed), gym.REWARD
    else:
        return _read("task.source", source, config, base, kind), None
    if config.plan is not None:
        made = [config.plan.applied({"prompt": each.prompt})["prompt"] for each in problems]
        problems = [replace(each, prompt=tuple(prompt)) for each, prompt in zip(problems, made, strict=True)]
    rows = kind.made(problems, seed)
    return rows, reward if rows is problems else None


def _read(setting: str, source: str, config: TaskConfig, base: Path, kind: DataKind) -> Sequence[Example]:
    """Return the rows of a file or of a Hugging Face data set; ``setting`` names it."""
    if not source.startswith(HUB):
        return read_rows(_file(setting, source, base), kind.read, config.plan)
    own = parse_source(config.source, subset=config.subset) if config.source.startswith(HUB) else None
    is_own = own is not None and own.name == parse_source(source).name
    found = parse_source(
        source,
        subset=own.subset if own is not None and is_own else None,
        split=config.split if setting == "task.source" else None,
    )
    rows = hub_rows(found, base, template_inputs(config.plan))
    return made_rows(rows, f"{HUB}{found.name}", f"{found} row", kind.read, config.plan)


def _file(setting: str, source: str, base: Path) -> Path:
    path = expanded(source)
    try:
        is_there = (base / path).exists()
    except OSError as error:
        raise DataError(f"{setting} is {source[:80]!r}", why=error.strerror or str(error)) from None
    if not path.suffix and not is_there:
        raise DataError(
            f"{setting} is {source!r}",
            why="it is neither a built-in task nor an existing file",
            fix=f"{nearest(source, [ARITHMETIC, GYM])}; a file ends in .jsonl or .parquet, and a data set of "
            f"Hugging Face is written {HUB}NAME",
        )
    return base / path


def _drawn(
    examples: Sequence[Example], config: TaskConfig, seed: int, *, is_exact: bool
) -> tuple[Example, ...]:
    """Draw the held-out rows by the seed, after removing duplicates: at most a tenth if no number is set."""
    if not config.held_out:
        return ()
    count, source = config.held_out, config.source
    first: dict[str, Example] = {}
    names = examples[0].compared
    for example in examples:
        first.setdefault(example.identity(names), example)
    if not is_exact:
        count = min(count, len(first) // LEFT_OUT)
    if count >= len(first):
        raise DataError(
            f"task.held_out is {count} and {source!r} has {len(first)} different rows",
            why="at least one must be left to train on",
            fix=f"hold out fewer than {len(first)}; rows differ by their prompt or a column other than 'id'",
        )
    return tuple(Random(seed).sample(list(first.values()), count))
