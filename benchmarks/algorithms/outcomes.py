"""Outcomes: forty small runs of known outcome, and what the summary says about each.

    CASES ─ train ─> run directory ─ summarise ─> kind and flags, compared with the case's label
                                   └ kept ─> the series that the judgement reads, for the tests

    cd benchmarks/results; python ../algorithms/outcomes.py --write outcomes.md --keep outcomes.jsonl
    python benchmarks/algorithms/outcomes.py --only nothing_moves-0 places-1

A label follows from how a run is made, before the summary sees the run. A rate of 1e-9 moves nothing; one of
0.03 destroys a small model; a reward drawn by chance teaches nothing; a burst at a high rate destroys a
policy that then learns its task again. Every case has several seeds. The judgement's limits were chosen on
the runs with an even number; those with an odd number were only judged.
"""

# ruff: noqa: ARG001  every reward takes the prompts
from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rillflow.app.python import train
from rillflow.runs.curves import plain
from rillflow.runs.outcome import OutcomeKind
from rillflow.runs.run_data import load
from rillflow.runs.summary import Summary, summary_of

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

# each trains the model that the cases start from, which takes most of the time
SMALLEST = []
SLOW = ["--only nothing_moves-0 --base-steps 5 --strong-steps 5 --steps 4"]

LETTERS = "abcdef"
LENGTH = 3
HELD_OUT = 100
BASE = "base"
NAMES = (
    "reward/score/",
    "reward/flat_groups",
    "rollout/length",
    "rollout/stopped",
    "supervised/nll",
    "pairs/loss",
)
"""Beginnings of the names of the metrics that the judgement reads."""
SETTINGS = (
    "policy.lr",
    "policy.warmup_steps",
    "evaluate.temperature",
    "rollout.temperature",
    "rollout.max_tokens",
    "algorithm.name",
)
"""Settings that the judgement reads."""
Part = Mapping[str, Any]
"""Settings of one part of a run, by dotted key."""


def places(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """Return the share of right letters."""
    return [
        sum(one == other for one, other in zip(said, right, strict=False)) / max(len(said), len(right))
        for said, right in zip(completions, answer, strict=True)
    ]


def exact(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """Return 1 for a right answer."""
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]


def distance(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """Return minus the number of wrong places, a reward without a least value."""
    return [
        -float(sum(one != other for one, other in zip(said.ljust(8), right.ljust(8), strict=True)))
        for said, right in zip(completions, answer, strict=True)
    ]


def longer(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Return the length of the answer: a reward that long answers exploit."""
    return [len(said) / 8 for said in completions]


def drawn(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Return a number that does not depend on the answer."""
    import random

    return [random.random() for _ in completions]


def always_0(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """Return 0, like a reward that looks for the answer behind a word that no answer has."""
    return [
        float(said.split("####")[-1] == f" {right}") for said, right in zip(completions, answer, strict=True)
    ]


def nothing(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float | None]:
    """Return no reward, like a judge that cannot read any answer."""
    return [None for _ in completions]


def always_1(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Return 1 for every answer."""
    return [1.0 for _ in completions]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run whose outcome is known."""

    name: str
    kind: OutcomeKind | None
    """The outcome; None for any but a collapse, where a level comes back from far below."""
    reward: Callable[..., Any] | None
    """The reward; None for supervised training."""
    parts: Sequence[Part]
    """Settings of each part of the run; a part continues the one before."""
    is_destroyed: bool = False
    """Whether the run is meant to make the policy much worse."""
    needs: str = ""
    """Word that a sentence, a warning or the advice must have."""
    common: Part = field(default_factory=dict)
    """Settings of every part."""
    seeds: int = 2


GOOD, HIGH, NONE = 1e-3, 3e-2, 1e-9
BURST = ({"algorithm.steps": 12}, {"algorithm.steps": 14, "policy.lr": 2e-2}, {"algorithm.steps": 70})
LATE = ({"algorithm.steps": 25}, {"algorithm.steps": 40, "policy.lr": HIGH})
CASES = (
    Case(name="places", kind=OutcomeKind.ROSE, reward=places, parts=[{}], seeds=4),
    Case(name="exact", kind=OutcomeKind.ROSE, reward=exact, parts=[{}], seeds=4),
    Case(name="distance", kind=OutcomeKind.ROSE, reward=distance, parts=[{}]),
    Case(name="sft", kind=OutcomeKind.ROSE, reward=None, parts=[{"algorithm.steps": 100}]),
    Case(
        name="greedy_at_its_best",
        kind=OutcomeKind.ROSE,
        reward=exact,
        parts=[{}],
        common={"rollout.temperature": 5.0, "policy.model.path": "strong"},
        needs="evaluate.temperature = 1",
    ),
    Case(name="length", kind=OutcomeKind.ROSE, reward=longer, parts=[{}], needs="read the longest samples"),
    Case(
        name="nothing_moves",
        kind=OutcomeKind.CHANCE,
        reward=places,
        parts=[{}],
        common={"policy.lr": NONE},
        needs="three times",
    ),
    Case(
        name="nothing_moves_exact",
        kind=OutcomeKind.CHANCE,
        reward=exact,
        parts=[{}],
        common={"policy.lr": NONE},
    ),
    Case(name="drawn", kind=OutcomeKind.CHANCE, reward=drawn, parts=[{}], common={"policy.lr": 1e-5}),
    Case(
        name="sft_nothing_moves", kind=OutcomeKind.CHANCE, reward=None, parts=[{}], common={"policy.lr": NONE}
    ),
    Case(
        name="high_rate",
        kind=OutcomeKind.COLLAPSED,
        reward=exact,
        parts=[{"policy.lr": HIGH}],
        is_destroyed=True,
        needs="policy.lr = 1e-2, a third of 3e-2",
    ),
    Case(
        name="high_rate_places",
        kind=OutcomeKind.COLLAPSED,
        reward=distance,
        parts=[{"policy.lr": 0.3}],
        is_destroyed=True,
        needs="a third of",
    ),
    Case(
        name="late",
        kind=OutcomeKind.COLLAPSED,
        reward=exact,
        parts=LATE,
        is_destroyed=True,
        needs="policy.lr = 1e-2",
    ),
    Case(
        name="sft_high_rate",
        kind=OutcomeKind.COLLAPSED,
        reward=None,
        parts=[{"policy.lr": 1.0}],
        is_destroyed=True,
        common={"policy.model.path": "strong"},
    ),
    Case(name="burst", kind=None, reward=places, parts=BURST, is_destroyed=True, needs="destroyed"),
    Case(name="always_0", kind=OutcomeKind.NO_SIGNAL, reward=always_0, parts=[{}], needs="mend the reward"),
    Case(name="nothing", kind=OutcomeKind.NO_SIGNAL, reward=nothing, parts=[{}], needs="mend the reward"),
    Case(name="always_1", kind=OutcomeKind.NO_SIGNAL, reward=always_1, parts=[{}], needs="harder prompts"),
)


def rows_of(seed: int) -> list[dict[str, str]]:
    """Return prompts of three letters whose answer is these letters in reverse order."""
    numbers = random.Random(seed)
    texts = sorted({"".join(numbers.choices(LETTERS, k=LENGTH)) for _ in range(2000)})
    numbers.shuffle(texts)
    return [{"prompt": f"{text}=", "answer": text[::-1]} for text in texts]


def recipe_of(algorithm: str, seed: int) -> dict[str, Any]:
    """Return the recipe that the cases change."""
    sampled = {"samples_per_prompt": 8} if algorithm == "grpo" else {}
    return {
        "run": {"seed": seed, "threads": 1, "checkpoint_minutes": 0, "device": "cpu"},
        "task": {"held_out": HELD_OUT},
        "policy": {"lr": GOOD, "warmup_steps": 0},
        "rollout": {"max_tokens": 8},
        "algorithm": {"name": algorithm, "steps": 40, "prompts_per_step": 16 if sampled else 32, **sampled},
        "evaluate": {"problems": HELD_OUT},
    }


def base(folder: Path, name: str, steps: int) -> Path:
    """Train the model that the cases start from, by examples alone."""
    run = folder / name
    if not run.is_dir():
        recipe = recipe_of("sft", 0)
        recipe["policy"] |= {"lr": 3e-3, "warmup_steps": 0}
        new = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "context": 16, "alphabet": LETTERS + "="}
        recipe["policy"]["model"] = {"new": new}
        train(
            recipe, prompts=rows_of(0), reward=exact, settings={"algorithm.steps": steps}, dir=run, quiet=True
        )
    return run


def made(case: Case, seed: int, folder: Path, bases: Mapping[str, Path], steps: int | None) -> Path:
    """Make a case's run, part by part, and return its directory."""
    run = folder / f"{case.name}-{seed}"
    if (run / "finished.json").is_file():
        return run
    recipe = recipe_of("sft" if case.reward is None else "grpo", seed)
    for part in case.parts:
        settings = {"policy.model.path": BASE, **case.common, **part}
        settings["policy.model.path"] = str(bases[settings["policy.model.path"]])
        if steps is not None:
            settings["algorithm.steps"] = steps
        train(recipe, prompts=rows_of(0), reward=case.reward or exact, settings=settings, dir=run, quiet=True)
    return run


def failures(case: Case, summary: Summary) -> list[str]:
    """Return what the summary says otherwise than the case's label."""
    outcome, found = summary.outcome, list[str]()
    is_right = outcome.kind is not OutcomeKind.COLLAPSED if case.kind is None else outcome.kind is case.kind
    if not is_right:
        found.append(f"{outcome.kind} instead of {case.kind or 'a loss that comes back'}")
    if outcome.is_destroyed is not case.is_destroyed:
        found.append("a lost level" if outcome.is_destroyed else "no lost level")
    said = " ".join([*outcome.sentences, *summary.warnings, *(each.text for each in outcome.advice)])
    if case.needs not in said:
        found.append(f"does not say {case.needs!r}")
    return found


def kept(run: Path, case: Case, number: int) -> dict[str, Any]:
    """Return what the judgement reads of a run, and the label."""
    data, numbers = load(run), dict[str, Any]()
    for name, reduction in data.curves.names.items():
        if name.startswith(NAMES):
            curve = data.curves.curve(name)
            values = [float(f"{value:.4g}") if math.isfinite(value) else None for value in curve.y.tolist()]
            numbers[name] = {"reduction": reduction, "count": plain(curve.weights[:1])[0], "values": values}
    looks = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return {
        "name": run.name,
        "half": "fitted" if number % 2 == 0 else "unseen",
        "kind": None if case.kind is None else str(case.kind),
        "is_destroyed": case.is_destroyed,
        "needs": case.needs,
        "phase": data.phases[-1].name,
        "settings": {key: data.setting(key) for key in SETTINGS},
        "evaluations": [
            {key: look[key] for key in look if key not in ("time_s", "length_mean")} for look in looks
        ],
        "metrics": numbers,
    }


def page(lines: Sequence[str], rights: Mapping[str, list[bool]], seconds: float) -> str:
    """Return the results page."""
    shares = "; ".join(f"{half} half: {sum(one)} of {len(one)}" for half, one in rights.items())
    total = [each for one in rights.values() for each in one]
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return "\n".join(
        [
            "# Outcomes: what the summary says about runs of known outcome",
            "",
            measured_at.line(),
            "",
            f"`python {' '.join(sys.argv)}`, {os.cpu_count()} cores with other work, {versions}; "
            f"the steps took {seconds:.0f} seconds in all.",
            "",
            f"**{sum(total)} of {len(total)} judged right; {shares}.**",
            "",
            "A label follows from how the run is made. The limits were chosen on the fitted half. One",
            "change for a fitted run (a loss that explodes is measured in logarithms) came after the first",
            "judgement of all runs, and mended its sibling of the unseen half too. Right means the kind, a",
            "lost level or none, and the words that the case needs. exact-1 does fall, from 0.66 to 0.20",
            "in two steps without a warm-up, and comes back: there the label is wrong, not the summary.",
            "",
            "| run | label | summary | training signal | held out | differs |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def row_of(name: str, case: Case, summary: Summary, differs: Sequence[str]) -> str:
    """Return the table's line of a run."""
    trend, looks = summary.outcome.trend, [one for one in (summary.before, summary.after) if one is not None]
    signal = "" if trend is None else f"{trend.first:.3f} -> {trend.last:.3f}"
    label, said = (
        f"{kind or 'not collapsed'}{', lost level' if is_destroyed else ''}"
        for kind, is_destroyed in (
            (case.kind, case.is_destroyed),
            (summary.outcome.kind, summary.outcome.is_destroyed),
        )
    )
    held = " -> ".join(f"{one.value:.3f}" for one in looks)
    return f"| {name} | {label} | {said} | {signal} | {held} | {'; '.join(differs)} |"


def main() -> None:
    """Make the runs, judge them and print the page."""
    arguments = _arguments()
    seconds, lines, lasting = 0.0, list[str](), list[str]()
    rights: dict[str, list[bool]] = {"fitted": [], "unseen": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        bases = {
            BASE: base(folder, BASE, arguments.base_steps),
            "strong": base(folder, "strong", arguments.strong_steps),
        }
        number = 0
        for case in CASES:
            for seed in range(case.seeds):
                name, half = f"{case.name}-{seed}", "fitted" if number % 2 == 0 else "unseen"
                if not arguments.only or name in arguments.only:
                    run = made(case, seed, folder, bases, arguments.steps)
                    summary = summary_of(load(run))
                    differs = failures(case, summary)
                    rights[half].append(not differs)
                    seconds += summary.seconds
                    lines.append(row_of(name, case, summary, differs))
                    lasting.append(json.dumps(kept(run, case, number)))
                    print(lines[-1], flush=True)
                number += 1
    text = page(lines, rights, seconds)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    if arguments.keep:
        arguments.keep.write_text("".join(f"{line}\n" for line in lasting))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="CASE-SEED", help="only these runs")
    parser.add_argument("--steps", type=int, help="steps of each run, for a trial")
    parser.add_argument("--base-steps", type=int, default=70, help="steps of the model to start from")
    parser.add_argument("--strong-steps", type=int, default=600, help="steps of the stronger one")
    parser.add_argument("--folder", help="keep the runs here, and use those that are there")
    parser.add_argument("--write", type=Path, help="also write the page here")
    parser.add_argument("--keep", type=Path, help="also write the judged series here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
