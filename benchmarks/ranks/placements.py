"""PPO under every placement: all 15 set partitions of its four roles over pools, on both backends.

    one pool, inline, n ranks ─┬─ the same n: rollouts and every metric of every step, bit for bit
                               └─ one rank: the same tokens and versions; losses within 1e-5 (relative)

    python benchmarks/ranks/placements.py  # 90 runs: Ray's start 259 processes, half an hour
    python benchmarks/ranks/placements.py --backend inline --ranks 1 2
    python benchmarks/ranks/placements.py --write benchmarks/results/placements.md  # keeps other rows

Inline and on Ray, with 1, 2 and 4 ranks per pool. Deterministic mode, float32, two updates of policy and
critic in each of two steps, and numbers of rows that the ranks do not divide. There are few steps for this
reason: Adam divides a gradient by its own size, so rounding differences between numbers of ranks grow from
step to step. Runs with equal numbers of ranks have no such differences.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.runs.layout import rollout_files
from rillflow.runs.reader import rollout_columns
from rillflow.workers.start import settle

SMALLEST = []
SLOW = ["--backend inline --ranks 1"]  # trains PPO under 15 placements

ROLES = ("policy", "critic", "reference", "reward")
LIMIT = 1e-5
"""Largest relative difference of a loss from that of one rank."""
CLOCKED = ("run/step_seconds/mean",)
"""Metrics of time."""
RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
lr = 1e-3
model.new = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[critic]
lr = 1e-3
[rollout]
max_rows = 32
max_tokens = 4
deterministic = true
[algorithm]
name = "ppo"
steps = 2
prompts_per_step = 7
samples_per_prompt = 3
minibatches = 2
lam = 0.9
kl_target = 0.5
loss.kl = 0.05
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""

Partition = tuple[tuple[str, ...], ...]
"""Roles of each pool."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Results of a run."""

    rollouts: list[dict[str, Any]]
    """Every sampled row in the run directory: tokens, log probabilities, versions, advantages."""
    metrics: list[dict[str, Any]]
    """Metrics of every step, without times."""

    @property
    def tokens(self) -> list[Any]:
        """Ids, tokens, versions, finish and reward of every sampled row."""
        names = ("epoch", "prompt_id", "sample", "tokens", "versions", "finish", "reward")
        return [[row[name] for name in names] for row in self.rollouts]

    @property
    def losses(self) -> list[float]:
        """Loss of the policy and of the critic, step by step."""
        return [step[f"{role}/loss/mean"]["mean"] for step in self.metrics for role in ("policy", "critic")]

    def far_from(self, other: Ran) -> float:
        """Return the largest relative difference of two losses."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(one - two) / abs(two) for one, two in pairs)


def partitions(items: Sequence[str]) -> Iterator[Partition]:
    """Yield every partition of ``items`` into sets."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield ((first,), *smaller)
        for index, held in enumerate(smaller):
            yield (*smaller[:index], (first, *held), *smaller[index + 1 :])


def settings(partition: Partition, ranks: int, backend: str) -> list[str]:
    """Return the recipe's settings for a placement."""
    found = [f'placement.backend="{backend}"']
    for index, held in enumerate(partition):
        found.append(f"placement.pools.pool{index}={ranks}")
        found += [f'placement.roles.{role}="pool{index}"' for role in held]
    return found


def ran(folder: Path, placement: Sequence[str]) -> Ran:
    """Run the recipe in a new folder with a placement's settings."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    where = f"run.dir={json.dumps(str(folder / 'run'))}"
    loaded = load_recipe(folder / "run.toml", [where, *placement])
    launch(loaded, quiet=True)
    told = [rollout_columns(folder / "run", step) for step in rollout_files(folder / "run")]
    steps = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return Ran(
        rollouts=[
            dict(zip(columns, row, strict=True))
            for columns in told
            for row in zip(*columns.values(), strict=True)
        ],
        metrics=[
            {name: value for name, value in step["metrics"].items() if name not in CLOCKED} for step in steps
        ],
    )


def together(ranks: int, folder: Path) -> Ran:
    """Run with all roles in one pool, inline; the baseline of the comparison."""
    return ran(folder, settings((ROLES,), ranks, "inline"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=["inline", "ray"], nargs="+", default=["inline", "ray"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks a pool (1 2 4)")
    parser.add_argument("--write", metavar="FILE", help="where the table goes, besides the screen")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(compared(arguments.backend, arguments.ranks, Path(folder)))
    print(report(rows))
    if arguments.write:
        kept = earlier(Path(arguments.write), rows)
        Path(arguments.write).write_text(report(sorted([*rows, *kept])))


def compared(backends: Sequence[str], counts: Sequence[int], folder: Path) -> Iterator[str]:
    """Yield a row of the table for every backend and number of ranks."""
    alone = together(1, folder / "alone")
    expected = {ranks: together(ranks, folder / f"together-{ranks}") for ranks in counts}
    for backend in backends:
        with cluster(backend, ranks=len(ROLES) * max(counts)):
            for ranks in counts:
                began = time.monotonic()
                found = [
                    each(folder / f"{backend}-{ranks}-{index}", partition, ranks, backend)
                    for index, partition in enumerate(partitions(ROLES))
                ]
                seconds = time.monotonic() - began
                same = sum(one == expected[ranks] for one in found)
                alike = sum(one.tokens == alone.tokens for one in found)
                far = max(one.far_from(alone) for one in found)
                yield (
                    f"| {backend} | {ranks} | {same} of {len(found)} | {alike} of {len(found)} | "
                    f"{far:.1e}{'' if far <= LIMIT else ' (too far)'} | {seconds:.0f} |"
                )


def earlier(page: Path, rows: Sequence[str]) -> list[str]:
    """Return the rows of a page that ``rows`` do not measure again."""
    measured = {tuple(row.split("|")[1:3]) for row in rows}
    lines = page.read_text().splitlines() if page.exists() else []
    there = [line for line in lines if line.startswith(("| inline |", "| ray |"))]
    return [line for line in there if tuple(line.split("|")[1:3]) not in measured]


def each(folder: Path, partition: Partition, ranks: int, backend: str) -> Ran:
    """Print a placement and run it."""
    shown = " | ".join("+".join(held) for held in partition)
    print(f"{backend}, {ranks} ranks a pool: {shown}", file=sys.stderr, flush=True)
    return ran(folder, settings(partition, ranks, backend))


@contextmanager
def cluster(backend: str, ranks: int) -> Iterator[None]:
    """Start one Ray cluster for all runs; do nothing inline."""
    if backend == "inline":
        yield
        return
    settle()  # before Ray is imported
    import ray

    ray.init(num_cpus=ranks, include_dashboard=False, logging_level="WARNING")
    try:
        yield
    finally:
        ray.shutdown()


def report(rows: Sequence[str]) -> str:
    """Return the whole page."""
    versions = ", ".join(
        [f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
        + [f"{name} {version(name)}" for name in ("torch", "ray")]
    )
    return "\n".join(
        [
            "# PPO under every placement",
            "",
            f"`python benchmarks/ranks/placements.py --write benchmarks/results/placements.md`, {versions}; "
            f"the "
            "setting is at the head of the script.",
            "",
            "Each row: the 15 set partitions of policy, critic, reference and reward over pools. Identical: "
            "every sampled row (tokens, log probabilities, versions, rewards) and every metric of every step "
            "has the bits of one pool, inline, of as many ranks. Losses against one rank: the largest "
            "difference of any of the policy's and the critic's, as a share of it.",
            "",
            "| backend | ranks a pool | identical | tokens of one rank | losses against one rank | s |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
