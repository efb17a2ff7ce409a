"""Replay facts: the settings, functions and data of each step of a run, and the reasons for a difference.

config.json ─ changes of later starts undone ─> settings of every step
sources/ ─ digest of that time ─> the function's file, if it has changed since
environment.json, digests.jsonl ─ compared with this machine ─> reasons
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rillflow.app.facts import Given, RecipeFacts
from rillflow.app.resume import SEVERAL, digest, keeps_decisions, require_same_rows, run_config
from rillflow.app.scorers import shipped_scorer
from rillflow.app.sections import Recipe
from rillflow.errors import DataError, RunDirectoryError
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_function
from rillflow.rewards.source import restored
from rillflow.runs import layout
from rillflow.runs.changes import Change, undone
from rillflow.runs.integrity import damage
from rillflow.runs.json_lines import JSON, read_lines
from rillflow.runs.reader import read_config, read_starts, require_run
from rillflow.runs.run_directory import require_format
from rillflow.tasks.files import GIVEN

_FUNCTIONS = {
    "reward": ("reward", "function"),
    "cost": ("cost", "function"),
    "agent": ("rollout", "agent", "function"),
    "environment": ("rollout", "environment", "source"),
}
"""Setting of a function by its name in the config's sources."""
_MACHINE = {"device": "device", "python": "Python", "platform": "platform", "git_revision": "git revision"}
"""Names of recorded facts that may explain a difference."""
_MOST_DAMAGE = 3
"""Largest number of damaged files and lines in the reasons."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The records of a run that a replay reads."""

    path: Path
    """The run directory."""
    config: Mapping[str, JSON]
    """The resolved config of the last start."""
    starts: Sequence[Mapping[str, JSON]]
    """Environment of each start of the run."""
    steps: Mapping[int, Mapping[str, JSON]]
    """Lines of metrics.jsonl by step."""

    @property
    def last(self) -> int:
        """Last recorded step."""
        return max(self.steps)

    @property
    def base(self) -> Path:
        """Folder of the recipe."""
        return Path(str(self.starts[-1].get("base") or "")) if self.starts else Path()


def recorded_run(run: Path) -> RecordedRun:
    """Read the records of a run.

    Raises:
        RunDirectoryError: it is not a run directory of this version, has no step, or a line is damaged.
    """
    require_run(run)
    require_format(run)
    steps = dict[int, Mapping[str, JSON]]()
    for line in read_lines(run / layout.METRICS).lines:
        step, metrics, phase = (line.data.get(name) for name in ("step", "metrics", "phase"))
        if not (isinstance(step, int) and isinstance(metrics, dict) and isinstance(phase, str)):
            raise line.refusal("it has no step, no phase or no metrics", "a line has all three")
        steps[step] = line.data
    if not steps:
        raise RunDirectoryError(
            f"{run} has no recorded step", why="a replay compares a step with its record in metrics.jsonl"
        )
    return RecordedRun(path=run, config=read_config(run), starts=read_starts(run), steps=steps)


def settings_by_step(data: RecordedRun, start: int, last: int) -> list[tuple[Mapping[str, JSON], int]]:
    """Return the configs of the steps after ``start`` in order, each with the last step it applies to."""
    found: dict[int, Mapping[str, JSON]] = {}
    config: Mapping[str, JSON] = data.config
    for index in reversed(range(len(data.starts))):
        found[index] = config
        changed: Any = data.starts[index].get("changes") or ()
        config = undone(config, [Change(**each) for each in changed])
    begun = [_start_of(data, step) for step in range(start + 1, last + 1)]
    parts, step = list[tuple[Mapping[str, JSON], int]](), start
    for index, steps in groupby(begun):
        step += len(list(steps))
        there = found.get(index, data.config)
        if parts and _results(parts[-1][0]) == _results(there):
            parts.pop()
        parts.append((there, step))
    return parts


def _results(config: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return a config without the settings that no result depends on."""
    run: Any = config.get("run") or {}
    return {**config, "run": {name: each for name, each in run.items() if not keeps_decisions(f"run.{name}")}}


def _start_of(data: RecordedRun, step: int) -> int:
    """Return the index of the start that made a step: the last one from an earlier step."""
    after = [each.get("after_step") for each in data.starts]
    begun = [index for index, known in enumerate(after) if isinstance(known, int) and known < step]
    return begun[-1] if begun else 0


def kept_functions(
    recipe: Recipe, data: RecordedRun, config: Mapping[str, JSON], folder: Path
) -> dict[str, Any]:
    """Return the settings of the functions that the run used at that time, where they have changed since.

    A function whose file has changed since is read from ``sources/``, next to the other files of its folder.

    Raises:
        RunDirectoryError: the prompts were given in Python, or the run has not kept the function.
    """
    if recipe.task.source == GIVEN:
        raise RunDirectoryError(
            f"{data.path} trained on prompts given in Python",
            why="the run directory keeps digests of the prompts, and not their texts",
            fix="write the prompts into a file, and train with task.source",
        )
    changed, weights = dict[str, Any](), dict(recipe.reward.named)
    for name, wanted in _sources(config).items():
        text = _named(recipe, name) if name in _FUNCTIONS or name.startswith(SEVERAL) else None
        if text is None:  # given in Python, or a setting of the replay removed it
            continue
        kept = _kept_version(text, name, wanted, data, recipe.reward, folder)
        if kept != text and name.startswith(SEVERAL):
            weights = {kept if each == text else each: weight for each, weight in weights.items()}
            changed["reward.functions"] = weights
        elif kept != text:
            changed[".".join(_FUNCTIONS[name])] = kept
    return changed


def given_rewards(data: RecordedRun, config: Mapping[str, JSON]) -> Given:
    """Return the rewards that a Python program gave to the run, from their source texts.

    Raises:
        RunDirectoryError: a source text is missing or has changed.
    """
    named = {
        name: wanted
        for name, wanted in _sources(config).items()
        if name not in _FUNCTIONS and not name.startswith(SEVERAL)
    }
    texts = {name: _kept_source(data.path, name, wanted, name) for name, wanted in named.items()}
    return Given(
        reward=tuple(restored(name.partition(".")[2], each.decode()) for name, each in texts.items())
    )


def _sources(config: Mapping[str, JSON]) -> Mapping[str, str]:
    """Return the digests of a config's functions, by name."""
    kept: Any = config.get("sources") or {}
    return {name: str(wanted) for name, wanted in kept.items()}


def _kept_source(run: Path, name: str, wanted: str, shown: str) -> bytes:
    """Return the text of a function in the run directory, in the version of a digest."""
    source = run / layout.SOURCES / f"{name}-{wanted}.py"
    text = source.read_bytes() if source.is_file() else None
    if text is None or digest(text) != wanted:
        state = "is missing" if text is None else "has changed"
        raise RunDirectoryError(
            f"the function {shown} of {run} is not available",
            why=f"its text had the digest {wanted}, and {source} {state}",
            fix=f"restore {source}; rillflow verify {run} names all damaged files",
        )
    return text.replace(b"rillflow.rewards.built_in.", b"rillflow_parts.scorers.")  # the scorers' old modules


def _kept_version(
    text: str, name: str, wanted: str, data: RecordedRun, reward: RewardConfig, folder: Path
) -> str:
    """Return the place of a function in the version of a digest; its own place if it has not changed."""
    found = shipped_scorer(text, reward)
    written, _, function = text.rpartition(":")
    file = data.base / written if found is None else found.file
    if file.is_file() and digest(file.read_bytes()) == wanted:
        return text
    if found is not None:
        function = found.name
    source = _kept_source(data.path, name, wanted, text)
    copied = folder / f"{name}-{wanted}" / file.name
    if not copied.exists():
        copied.parent.mkdir(parents=True)
        for beside in file.parent.iterdir() if file.parent.is_dir() else ():
            if beside.name not in (file.name, "__pycache__"):
                (copied.parent / beside.name).symlink_to(beside.absolute())
        copied.write_bytes(source)
    chosen = f"{copied}:{function}"
    parse_function(chosen, data.base)
    return chosen


def _named(recipe: Recipe, name: str) -> str | None:
    """Return the setting that names a function, by its name in the config's sources; None if it is gone."""
    if name.startswith(SEVERAL):
        names = {text.rpartition(":")[2].replace("-", "_"): text for text in recipe.reward.functions or {}}
        return names.get(name.removeprefix(SEVERAL))
    table: dict[str, Any] = recipe.model_dump()
    *sections, setting = _FUNCTIONS[name]
    for part in sections:
        table = table[part] or {}
    text: str | None = table.get(setting)
    return text


def require_same_data(facts: RecipeFacts, data: RecordedRun, config: Mapping[str, JSON]) -> None:
    """Refuse data that are not those of the run at that time.

    Raises:
        DataError: a row has changed, is missing, or was added; the message names the first changed row.
    """
    wanted: Any = config.get("data")
    now = run_config(facts.resolved, facts.task)["data"]
    if wanted is None or now == wanted:
        return
    if (data.path / layout.DATA).is_file():
        require_same_rows(facts.task, data.path)
    raise DataError(
        f"{facts.task.name} has {now['rows']} rows; these steps of {data.path} used {wanted['rows']}",
        why="the rows of a step depend on the number of rows, and its data differ from the present ones",
        fix="restore the data, or replay a step that was made with the present ones",
    )


def reasons(
    data: RecordedRun, step: int, starts: Sequence[Mapping[str, JSON]], settings: Sequence[str]
) -> list[str]:
    """Return facts that may explain a difference, each found by a comparison.

    Args:
        data: the recorded run.
        step: step of the difference.
        starts: starts of the replay.
        settings: settings that were changed for the replay.
    """
    found = [f"the replay changed a setting: {text}" for text in settings]
    tables: Any = data.config
    recorded = data.starts[_start_of(data, max(1, step))] if data.starts else {}
    if recorded and starts:
        found += _machine(recorded, starts[-1], tables["run"].get("threads") == 0)
    found += _resumed(data, step, tables["schedule"].get("freshness", 0))
    hurt = damage(data.path, is_deep=True)
    found += [f"damaged since the run wrote it: {each}" for each in hurt[:_MOST_DAMAGE]]
    left = len(hurt) - _MOST_DAMAGE
    return found + ([f"{left} more damaged places: rillflow verify {data.path}"] if left > 0 else [])


def _machine(recorded: Mapping[str, Any], here: Mapping[str, Any], has_free_threads: bool) -> list[str]:
    """Return the differences between two machines and their software."""
    versions, now = recorded.get("versions") or {}, here.get("versions") or {}
    pairs = {f"version of {name}": (versions.get(name), now.get(name)) for name in {**versions, **now}}
    pairs |= {said: (recorded.get(name), here.get(name)) for name, said in _MACHINE.items()}
    if has_free_threads:
        pairs["cores (run.threads is 0)"] = (recorded.get("cores"), here.get("cores"))
    placed, placed_now = recorded.get("placement") or {}, here.get("placement") or {}
    pairs |= {f"placement.{name}": (placed.get(name), placed_now.get(name)) for name in placed_now}
    return [
        f"{name}: the run had {one}, the replay {other}"
        for name, (one, other) in pairs.items()
        if one != other
    ]


def _resumed(data: RecordedRun, step: int, lag: int) -> list[str]:
    """Return the resumes that may have sampled a step with other weights than an uninterrupted run."""
    after = {each.get("after_step") for each in data.starts}
    near = sorted(at for at in after if isinstance(at, int) and 0 < at < step <= at + lag)
    return [
        f"the run resumed after step {at}; a checkpoint without rows sampled ahead makes step {step} differ"
        for at in near
    ]
