"""Layout: which file of a run directory holds what; the one place that knows the names.

RUN/
  run.lock             who is writing now             digests.jsonl      by which all of it is verified
  config.json          the resolved config            environment.json   each start of the run
  data.json            what its rows are known by
  metrics.jsonl        one line a step                spans.jsonl        one line a stage and step
  evaluations.jsonl    one line an evaluation         rollouts/          a file a step and rank, in columns
tokens.json          the text of every token
  checkpoints/         written by another package     summary.json, report.html
  reference/           the policy as the last phase found it, where one is asked for
  reference_totals.jsonl   what it gives rows of data, where that is asked for
  skips.jsonl          one line an update left out    bundles/           what each was, a folder a step
  given_up.jsonl       one line a group that was sampled and not trained
  sources/             the files of the recipe's functions, each version that was used
  plan.toml            what a planned run was launched by
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

FORMAT = 1
"""The version of this layout; a directory of a higher one is refused."""
LOCK = "run.lock"
CONFIG = "config.json"
DATA = "data.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SPANS = "spans.jsonl"
DIGESTS = "digests.jsonl"
EVALUATIONS = "evaluations.jsonl"
ROLLOUTS = "rollouts"
TOKENS = "tokens.json"
CHECKPOINTS = "checkpoints"
REFERENCE = "reference"
SOURCES = "sources"
SKIPS = "skips.jsonl"
GIVEN_UP = "given_up.jsonl"
BUNDLES = "bundles"
DRAFT = "draft"
SUMMARY = "summary.json"
REPORT = "report.html"
FINISHED = "finished.json"
PLAN = "plan.toml"
LINE_FILES = (METRICS, SPANS, EVALUATIONS, SKIPS, GIVEN_UP)

_ROLLOUT_FILE = re.compile(r"step-(\d{6,})(?:\.jsonl|-(\d{4,})-of-(\d{4,})\.safetensors)")


def is_run_directory(path: Path) -> bool:
    """Whether a driver made this directory; a model's directory also has a config.json, but no lock."""
    return (path / LOCK).is_file() or ((path / ENVIRONMENT).is_file() and (path / CONFIG).is_file())


def rollout_file(run: Path, step: int, part: int, count: int) -> Path:
    """Where one of so many parts of a step's rollouts lies, counted from 1."""
    return run / ROLLOUTS / f"step-{step:06d}-{part:04d}-of-{count:04d}.safetensors"


def rollout_files(run: Path) -> Mapping[int, tuple[Path, ...]]:
    """The rollout files of steps that have all of theirs, by step, in order; an older run's step has one."""
    found = written_rollouts(run)
    return {step: files for step, files in found.items() if len(files) == _parts(files[0])}


def written_rollouts(run: Path) -> Mapping[int, tuple[Path, ...]]:
    """The rollout files there are, by step, in order; anything else in the folder is not ours."""
    folder, found = run / ROLLOUTS, dict[int, tuple[Path, ...]]()
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _ROLLOUT_FILE.fullmatch(entry.name):
            found[int(match[1])] = (*found.get(int(match[1]), ()), entry)
    return dict(sorted(found.items()))


def _parts(file: Path) -> int:
    """Of how many files this is one."""
    match = _ROLLOUT_FILE.fullmatch(file.name)
    return int(match[3] or 1) if match else 0
