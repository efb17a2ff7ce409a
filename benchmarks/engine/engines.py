"""Training with each rollout engine: native, and vLLM in the trainer's process, in a pool, and as a server.

    warm start ─> base ─┬─ native                         freshness 0, one version ahead
     one per seed       ├─ vLLM in the trainer's process  freshness 0
                        ├─ vLLM in a pool of its own      freshness 0, one version ahead
                        └─ vLLM as a server               freshness 0, one version ahead

    python benchmarks/engine/engines.py --seeds 0 1 2 --write benchmarks/results/engines.md    # 30 minutes

Every run is a whole `rillflow run` of the same recipe, base and seeds. Runs with vLLM in their process use
the Python of --vllm (make test-vllm creates one). Other runs, including the trainers of servers, use this
Python. A separate pool is on Ray, and so is every run one version ahead. The time of a publish has two parts:
the step's stage, and the time that the engine takes to load and to score the canary, measured apart on the
same model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median

from rillflow.runs.reader import read_evaluations, read_metrics, read_spans

sys.path.append(str(Path(__file__).parents[1]))
from intervals import interval

SMALLEST = []
SLOW = ["--engines native --steps 5"]  # trains three policies in processes of their own

ROOT = Path(__file__).parents[2]
RECIPE = """
[run]
threads = 1
checkpoint_minutes = 0
[task]
source = "arithmetic"
digits = 2
operators = "+"
held_out = 500
[policy]
lr = 1e-4
beta2 = 0.99
model.new = { hidden = 128, layers = 4, heads = 4, kv_heads = 2, context = 32, alphabet = "0123456789+-=" }
[rollout]
max_rows = 512
max_tokens = 4
[warm_start]
steps = 170
prompts_per_step = 256
lr = 1e-3
warmup_steps = 20
[algorithm]
name = "grpo"
steps = 40
prompts_per_step = 64
samples_per_prompt = 8
loss.correction = "tis"
[evaluate]
problems = 500
"""
COMMAND = "import sys; from rillflow.cli.main import main; sys.exit(main())"
APART = (
    "placement.backend=ray",
    "placement.pools={ main = 1, answers = 1 }",
    'placement.roles={ sampler = "answers" }',
)
AHEAD = (*APART, 'schedule={mode="ahead",freshness=1}')
SKIPPED = 3
"""First steps of a run whose seconds do not count."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """An engine with its placement and freshness."""

    name: str
    """Name in the table."""
    pace: str
    """"in step" (freshness 0) or "one ahead"."""
    engine: str
    """"native", "vllm" in the run's processes, or "served"."""
    settings: Sequence[str] = ()
    """Settings other than the engine's."""


FORMS = (
    Form(name="native", pace="in step", engine="native"),
    Form(name="vLLM in process", pace="in step", engine="vllm"),
    Form(name="vLLM in a pool", pace="in step", engine="vllm", settings=APART),
    Form(name="vLLM as a server", pace="in step", engine="served"),
    Form(name="native in a pool", pace="one ahead", engine="native", settings=AHEAD),
    Form(name="vLLM in a pool", pace="one ahead", engine="vllm", settings=AHEAD),
    Form(name="vLLM as a server, in a pool", pace="one ahead", engine="served", settings=AHEAD),
)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Results of one run."""

    before: float
    """Accuracy of the base on held-out problems."""
    accuracy: float
    """Accuracy at the last evaluation."""
    reward: float
    """Mean reward of the last five steps."""
    tokens_s: float
    """Sampled tokens per second of generation, with loading."""
    step_s: float
    """Median seconds of a step."""
    publish_s: float
    """Median seconds of the stage ``policy.publish``."""
    gap: float
    """Largest difference between sampler's and trainer's log probability of a token, over all steps."""
    kl: float
    """Mean KL estimate in nats per token."""


def python_of(engine: str, vllm: str) -> str:
    """Return the interpreter of a form's processes."""
    return vllm if engine == "vllm" else sys.executable


def engine_settings(engine: str, vllm: str) -> list[str]:
    """Return the recipe's settings of the engine."""
    served = [f"rollout.server={json.dumps(vllm)}"] if engine == "served" else []
    return [f"rollout.engine={'native' if engine == 'native' else 'vllm'}", *served]


def said_by(command: Sequence[str]) -> str:
    """Run a command with this checkout of Rillflow and return its output."""
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def run(python: str, recipe: Path, folder: Path, *settings: str) -> Path:
    """Run a recipe with the command and return its run directory."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [python, "-c", COMMAND, "run", str(recipe), "--dir", str(folder), "--quiet", *words]
    said_by(command)
    return folder


def ran(folder: Path) -> Ran:
    """Return the results of a run."""
    steps = [each.metrics for each in read_metrics(folder)]
    spans = [each for each in read_spans(folder) if each.step > SKIPPED]
    generated = [each for each in spans if each.stage == "policy.generate"]
    looks = [each.accuracy or 0.0 for each in read_evaluations(folder)]
    tokens = sum(each["rollout/tokens/sum"].value for each in steps[SKIPPED:])
    return Ran(
        before=looks[0],
        accuracy=looks[-1],
        reward=fmean(each["reward/score/mean"].value for each in steps[-5:]),
        tokens_s=tokens / sum(each.duration_s for each in generated),
        step_s=median(each["run/step_seconds/mean"].value for each in steps[SKIPPED:]),
        publish_s=median(each.duration_s for each in spans if each.stage == "policy.publish"),
        gap=max(each["mismatch/logprob_gap/max"].value for each in steps),
        kl=fmean(each["mismatch/kl/mean"].value for each in steps),
    )


def load_seconds(base: Path, server: str) -> float:
    """Return the median seconds of five loads with their canary, by vLLM in process or served.

    The interpreter that has vLLM calls this.
    """
    import torch

    from rillflow.models.config import ModelConfig
    from rillflow.models.language_model import load_model
    from rillflow.roles.logprob_check import canary_texts
    from rillflow.rollout.config import RolloutConfig
    from rillflow.rollout.engine import Stops
    from rillflow.workers.collectives import SingleRank
    from rillflow_parts.vllm.engine import VllmEngine

    torch.set_num_threads(1)
    of = load_model(ModelConfig(path=str(base)), seed=0, device=torch.device("cpu"), base=Path())
    config, stops = RolloutConfig(max_rows=512, max_tokens=4, server=server or None), Stops((), of.tokenizer)
    engine = VllmEngine(
        of.module, config, stop_tokens=stops.tokens, seed=0, context=of.context, tp=SingleRank(), stops=stops
    )
    taken = []
    for number in range(6):
        began = time.perf_counter()
        engine.load(number, dict(of.module.named_parameters()))
        engine.score(canary_texts(of))
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def load_of(engine: str, vllm: str, base: Path) -> float:
    """Return the seconds in which an engine loads a version; 0 for the native one, which shares weights."""
    if engine == "native":
        return 0.0
    server = vllm if engine == "served" else ""
    command = [python_of(engine, vllm), str(Path(__file__)), "--load", str(base), "--server", server]
    return float(said_by(command).split()[-1])


def table(seeds: Sequence[int], steps: int, vllm: str, chosen: Sequence[str]) -> list[str]:
    """Run every form with every seed; return the table."""
    found: dict[Form, list[Ran]] = {}
    forms = [form for form in FORMS if not chosen or form.engine in chosen]
    loads = dict[str, float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "run.toml"
        recipe.write_text(RECIPE)
        for seed in seeds:
            short = ("algorithm.steps=1", "run.checkpoint_every=1", "evaluate=none")
            made = run(sys.executable, recipe, folder / f"{seed}-base", f"run.seed={seed}", *short)
            base = min((made / "checkpoints").glob("step-*")) / "policy"
            how = (
                f"run.seed={seed}",
                f"algorithm.steps={steps}",
                "warm_start=none",
                "policy.model.new=none",
                f"policy.model.path={json.dumps(str(base))}",
            )
            for engine in {form.engine: None for form in forms if form.engine not in loads}:
                loads[engine] = load_of(engine, vllm, base)
            for number, form in enumerate(forms):
                engine = engine_settings(form.engine, vllm)
                where = folder / f"{seed}-{number}"
                run(python_of(form.engine, vllm), recipe, where, *how, *engine, *form.settings)
                found.setdefault(form, []).append(ran(where))
                print(
                    f"seed {seed}, {form.name}, {form.pace}: {found[form][-1]}", file=sys.stderr, flush=True
                )
    lines = [
        "| engine | pace | accuracy, by seed: before, after | mean after | last rewards "
        "| tokens/s | a step, s | a publish, s: stage + engine | largest gap | kl, nats |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for form, each in found.items():
        by_seed = ", ".join(f"{one.before:.3f} {one.accuracy:.3f}" for one in each)
        lines.append(
            f"| {form.name} | {form.pace} | {by_seed} | {interval([one.accuracy for one in each])} "
            f"| {interval([one.reward for one in each])} | {median(one.tokens_s for one in each):,.0f} "
            f"| {median(one.step_s for one in each):.2f} "
            f"| {median(one.publish_s for one in each):.3f} + {loads[form.engine]:.3f} "
            f"| {max(one.gap for one in each):.1e} | {fmean(one.kl for one in each):.1e} |"
        )
    return lines


def main() -> None:
    """Run every seed; print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = sys.executable if find_spec("vllm") else str(ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--vllm", default=own, help="the python of an environment with vLLM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of base and training")
    parser.add_argument("--steps", type=int, default=40, help="of GRPO (40)")
    parser.add_argument(
        "--engines", nargs="+", default=(), choices=("native", "vllm", "served"), help="all if left out"
    )
    parser.add_argument("--write", type=Path, help="the page to write; printed if left out")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--server", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(load_seconds(given.load, given.server))
        return
    vllm = str(Path(given.vllm).absolute())
    seeds = " ".join(map(str, given.seeds))
    page = [
        "# Rollout engines",
        "",
        f"`python benchmarks/engine/engines.py --seeds {seeds} --steps {given.steps}`, "
        f"{os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}; the recipe is at the head of the script. Gap and kl are "
        "between sampler and trainer: one version ahead, a step's training too. Means are of the seeds, with "
        "half of their 95% interval by Student's t.",
        "",
        *table(given.seeds, given.steps, vllm, given.engines),
        "",
    ]
    if given.write:
        given.write.write_text("\n".join(page), "utf-8")
    else:
        sys.stdout.write("\n".join(page))


if __name__ == "__main__":
    main()
