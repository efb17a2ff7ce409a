"""Layout: the names and contents of the files in a run directory.

RUN/
  run.lock             current writer                 digests.jsonl      digests of all lines and files
  config.json          the resolved config            environment.json   each start of the run
  data.json            digests of its rows
  metrics.jsonl        one line per step              spans.jsonl        one line per stage and step
  passes.jsonl         one line per step of a pipeline
  evaluations.jsonl    one line per evaluation        rollouts/          one file per step and rank
  tokens.json          the text of every token
  checkpoints/         written by another package     summary.json, report.html
  reference/           the policy at the start of the last phase, if requested
  reference_totals.jsonl   total log probabilities of data rows under the reference, if requested
  skips.jsonl          one line per skipped update    bundles/           their data, a folder per step
  given_up.jsonl       one line per group that was sampled and not trained
  sources/             the files of the recipe's functions, in each version used
  plan.toml            the plan of a planned run
  output.log           lines that the screen did not take; no part of the run's evidence
  media/               pictures and videos, which the report shows
  used_by/             a note of each run that stands on a checkpoint of this one
  trackers/            what each tracker has, and what it printed; no part of the run's evidence
  service/             while it runs: addresses for programs that sample (``rollout.engine = "service"``)
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

FORMAT = 1
"""Version of this layout; a directory with another format is refused."""
LOCK = "run.lock"
CONFIG = "config.json"
DATA = "data.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SPANS = "spans.jsonl"
PASSES = "passes.jsonl"
DIGESTS = "digests.jsonl"
EVALUATIONS = "evaluations.jsonl"
ROLLOUTS = "rollouts"
TOKENS = "tokens.json"
CHECKPOINTS = "checkpoints"
REPLACED = ".replaced"
"""Ending of the previous checkpoint of the same step."""
_CHECKPOINT = re.compile(r"step-(\d{6,})(\.replaced)?")
REFERENCE = "reference"
SOURCES = "sources"
SKIPS = "skips.jsonl"
DECISIONS = "decisions.jsonl"
GIVEN_UP = "given_up.jsonl"
BUNDLES = "bundles"
DRAFT = "draft"
SUMMARY = "summary.json"
REPORT = "report.html"
FINISHED = "finished.json"
PLAN = "plan.toml"
OUTPUT_LOG = "output.log"
MEDIA = "media"
TRACKERS = "trackers"
USED_BY = "used_by"
BASES = "bases"
"""Key of config.json with the models that the run stands on."""
STEP_FILES = (METRICS, SPANS, PASSES, EVALUATIONS, SKIPS, GIVEN_UP)
"""Files whose lines belong to a step."""
LINE_FILES = (*STEP_FILES, DECISIONS)
GUESSED_PARTS = 8
"""A step with at most this many rollout files is found without listing the folder."""

_ROLLOUT_FILE = re.compile(r"step-(\d{6,})(?:\.jsonl|-(\d{4,})-of-(\d{4,})\.safetensors)")


def is_run_directory(path: Path) -> bool:
    """Return whether a run made this directory; a model's directory also has a config.json, but no lock."""
    return (path / LOCK).is_file() or ((path / ENVIRONMENT).is_file() and (path / CONFIG).is_file())


def rollout_file(run: Path, step: int, part: int, count: int) -> Path:
    """Return the path of part ``part`` of ``count`` of a step's rollouts, counted from 1."""
    return run / ROLLOUTS / f"step-{step:06d}-{part:04d}-of-{count:04d}.safetensors"


def rollout_files(run: Path) -> Mapping[int, tuple[Path, ...]]:
    """Return rollout files by step in order, for steps with all parts; older runs have one file per step."""
    found = written_rollouts(run)
    return {step: files for step, files in found.items() if len(files) == _parts(files[0])}


def written_rollouts(run: Path) -> Mapping[int, tuple[Path, ...]]:
    """Return existing rollout files by step in order; other files in the folder are ignored."""
    folder, found = run / ROLLOUTS, dict[int, tuple[Path, ...]]()
    # Names are sorted, not paths: sorting 100,000 paths takes seconds.
    for name in sorted(entry.name for entry in os.scandir(folder)) if folder.is_dir() else ():
        if match := _ROLLOUT_FILE.fullmatch(name):
            found[int(match[1])] = (*found.get(int(match[1]), ()), folder / name)
    return dict(sorted(found.items()))


def files_of_step(run: Path, step: int) -> tuple[Path, ...]:
    """Return the rollout files of one step, all its parts, without listing the folder; empty without them."""
    for count in range(1, GUESSED_PARTS + 1):
        files = tuple(rollout_file(run, step, part, count) for part in range(1, count + 1))
        if all(file.exists() for file in files):
            return files
    return rollout_files(run).get(step, ())


def _parts(file: Path) -> int:
    """Return the number of parts that a file name gives for its step."""
    match = _ROLLOUT_FILE.fullmatch(file.name)
    return int(match[3] or 1) if match else 0


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoint directories in a folder, newest first."""
    named = (path for path in folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name))
    return sorted(named, key=lambda path: (checkpoint_step(path), not path.suffix), reverse=True)


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint's directory."""
    return int(path.stem.removeprefix("step-"))


def kept_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order, without verifying them."""
    return sorted({checkpoint_step(path) for path in checkpoint_folders(folder)})
