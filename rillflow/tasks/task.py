"""Task: the rows that a run trains on, and the rows that evaluate it.

    source ─ made or read ─> examples ─ split by row ─┬─> train
    held_out_source ────────────────────────────────> └─> held_out

No row is in both: training rows that are also held out are removed from training, and counted. Two rows are
equal if their prompts and their other columns are equal, except the column ``id``, the answers of pairs and
the answers to learn from. Opening a task imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from rillflow.errors import DataError, nearest
from rillflow.rewards.function import FunctionPath
from rillflow.tasks import arithmetic, gym
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.example import Example, example_of
from rillflow.tasks.files import Rows, given_rows, read_rows
from rillflow.tasks.fingerprint import Fingerprint
from rillflow.tasks.labelled import LabelledAnswer, labelled_halves, labelled_of
from rillflow.tasks.preference import Preference, arithmetic_preferences, preference_of

Row = TypeVar("Row", bound=Example)
RowOut = TypeVar("RowOut", bound=Example, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Task(Generic[RowOut]):
    """Prompts to train on and held-out prompts.

    Example:
        open_task(TaskConfig(source="arithmetic", size=100, held_out=10), base=Path(), seed=0).train[0].prompt
    """

    name: str
    """Name of the source."""
    train: tuple[RowOut, ...]
    """Rows to train on."""
    held_out: tuple[RowOut, ...]
    """Rows for evaluation; drawn rows are in random order, so any first part of them is a random sample."""
    left_out: int
    """Training rows removed because the same row is held out."""
    shared_prompts: int
    """Training rows whose prompt is held out in a row with other columns."""
    reward: tuple[FunctionPath, ...]
    """Reward functions of the task, which are summed; empty if the recipe must name one."""
    fingerprint: Fingerprint
    """Digests by which a resumed run recognises its rows."""
    sets: Mapping[str, tuple[RowOut, ...]] = field(default_factory=dict)
    """Further rows for evaluation, by name; their prompts may also be trained on."""

    @property
    def digest(self) -> str:
        """Digest that identifies the data."""
        return self.fingerprint.digest


def open_task(
    config: TaskConfig, *, base: Path, seed: int, drawn: int | None = None, rows: Rows | None = None
) -> Task[Example]:
    """Generate or read a task's rows and hold some of them out.

    Args:
        config: the task section of the recipe.
        base: folder of relative files.
        seed: determines generated problems, and the held-out rows.
        drawn: number of first rows of the source from which held-out rows are drawn; None: all. Rows added to
            a run's data later are only trained on, so the held-out rows stay the same.
        rows: rows given in Python, instead of the source.

    Raises:
        DataError: the source is unknown or its data is invalid; no row is left to train on.
    """
    made = (given_rows(rows, example_of), None) if rows is not None else _rows(config, base, seed)
    return _split(config, made[0], base, seed, drawn, example_of, made[1])


def open_preferences(
    config: TaskConfig, *, base: Path, seed: int, drawn: int | None = None, rows: Rows | None = None
) -> Task[Preference]:
    """Generate or read pairs of answers and hold those of some prompts out.

    Args and raises as ``open_task``; reasoning-gym has no pairs.
    """
    pairs = given_rows(rows, preference_of) if rows is not None else _pairs(config, base, seed)
    return _split(config, pairs, base, seed, drawn, preference_of)


def read_sets(
    sets: Mapping[str, str], base: Path, make: Callable[[dict[str, Any], int, str], Example] = example_of
) -> dict[str, tuple[Example, ...]]:
    """Return the rows of evaluation files by name; ``make`` converts one row of a file.

    Raises:
        DataError: a file is invalid.
    """
    return {name: tuple(read_rows(base / Path(file).expanduser(), make)) for name, file in sets.items()}


def open_labelled(
    config: TaskConfig, *, base: Path, seed: int, drawn: int | None = None, rows: Rows | None = None
) -> Task[LabelledAnswer]:
    """Generate or read single answers, each good or bad, and hold some out.

    Args and raises as ``open_task``; reasoning-gym has only right answers.
    """
    if rows is not None:
        answers = given_rows(rows, labelled_of)
    elif config.source == "arithmetic":
        answers = labelled_halves(arithmetic_preferences(**_drawing(config, seed)))
    else:
        _require_file(config.source, "labelled answers", "'prompt', 'completion' and 'label'")
        answers = read_rows(_file("source", config.source, base), labelled_of)
    return _split(config, answers, base, seed, drawn, labelled_of)


def _require_file(source: str, wanted: str, columns: str) -> None:
    """Raise DataError for reasoning-gym sources, whose problems have one answer each."""
    if source.startswith(gym.PREFIX):
        raise DataError(
            f"task.source is {source!r}",
            why=f"its problems have one answer each, and the algorithm needs {wanted}",
            fix=f"set task.source to a file with the columns {columns}, or to arithmetic",
        )


def _pairs(config: TaskConfig, base: Path, seed: int) -> list[Preference]:
    if config.source == "arithmetic":
        return arithmetic_preferences(**_drawing(config, seed))
    _require_file(config.source, "pairs", "'prompt', 'chosen' and 'rejected'")
    return read_rows(_file("source", config.source, base), preference_of)


def _drawing(config: TaskConfig, seed: int) -> dict[str, Any]:
    return {"size": config.size, "digits": config.digits, "operators": config.operators, "seed": seed}


def _split(
    config: TaskConfig,
    examples: Sequence[Row],
    base: Path,
    seed: int,
    drawn: int | None,
    make: Callable[[dict[str, Any], int, str], Row],
    reward: FunctionPath | None = None,
) -> Task[Row]:
    if config.held_out_source is not None:
        held_out = tuple(read_rows(_file("held_out_source", config.held_out_source, base), make))
    else:
        held_out = _drawn(examples[:drawn], config.held_out, seed, config.source)
    names = examples[0].compared & held_out[0].compared if held_out else frozenset[str]()
    apart, prompts = {row.identity(names) for row in held_out}, {row.key for row in held_out}
    train = tuple(example for example in examples if example.identity(names) not in apart)
    if not train:
        raise DataError(
            f"nothing of {config.source!r} is left to train on",
            why=f"every one of its {len(examples)} rows is held out",
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


def _rows(config: TaskConfig, base: Path, seed: int) -> tuple[list[Example], FunctionPath | None]:
    """Return the source's rows, and its own reward function."""
    source = config.source
    if source == "arithmetic":
        return arithmetic.arithmetic_examples(**_drawing(config, seed)), arithmetic.REWARD
    if source.startswith(gym.PREFIX):
        return gym.gym_examples(source, size=config.size, seed=seed), gym.REWARD
    return read_rows(_file("source", source, base), example_of), None


def _file(setting: str, source: str, base: Path) -> Path:
    path = Path(source).expanduser()
    try:
        is_there = (base / path).exists()
    except OSError as error:
        raise DataError(f"task.{setting} is {source[:80]!r}", why=error.strerror or str(error)) from None
    if not path.suffix and not is_there:
        raise DataError(
            f"task.{setting} is {source!r}",
            why="it is neither a built-in task nor an existing file",
            fix=f"{nearest(source, ['arithmetic', gym.PREFIX])}; a file ends in .jsonl or .parquet",
        )
    return base / path


def _drawn(examples: Sequence[Row], count: int, seed: int, source: str) -> tuple[Row, ...]:
    """Draw ``count`` rows by the seed, after removing duplicates."""
    if not count:
        return ()
    first: dict[str, Row] = {}
    names = examples[0].compared
    for example in examples:
        first.setdefault(example.identity(names), example)
    if count >= len(first):
        raise DataError(
            f"task.held_out is {count} and {source!r} has {len(first)} different rows",
            why="at least one must be left to train on",
            fix=f"hold out fewer than {len(first)}; rows differ by their prompt or a column other than 'id'",
        )
    return tuple(Random(seed).sample(list(first.values()), count))
