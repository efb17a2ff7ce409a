"""Machines: the memory that `rillflow check` estimates for published model sizes on common GPU machines.

    python benchmarks/planner/machines.py                               # counts, in seconds; no GPU is needed
    python benchmarks/planner/machines.py --write benchmarks/results/machines.md

Each case is a recipe for a model of Qwen2.5's sizes with 512 prompt and 1,024 answer tokens, 32 prompts of 8
samples. Settings that a recipe leaves out are those that ``rillflow check`` chooses on a CUDA device. Nothing
is trained: the estimate is the line ``memory`` of ``rillflow check``, and libraries are not in it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rillflow.app.memory import estimate
from rillflow.app.model_files import ModelSizes, sizes_from
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.runs.formatting import size

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = [""]
SHAPES = {
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv": 2, "inner": 4864, "words": 151_936},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv": 2, "inner": 8960, "words": 151_936},
    "3B": {"hidden": 2048, "layers": 36, "heads": 16, "kv": 2, "inner": 11_008, "words": 151_936},
    "7B": {"hidden": 3584, "layers": 28, "heads": 28, "kv": 4, "inner": 18_944, "words": 152_064},
    "14B": {"hidden": 5120, "layers": 48, "heads": 40, "kv": 8, "inner": 13_824, "words": 152_064},
    "32B": {"hidden": 5120, "layers": 64, "heads": 40, "kv": 8, "inner": 27_648, "words": 152_064},
}
"""Sizes of Qwen2.5."""
TIED = ("0.5B", "1.5B", "3B")
PROMPT, ANSWER = 512, 1024
GIB = 2**30
MARGIN = 1.35
"""Measured peak over the estimate of the one case that was measured: 0.5B on an H200 (results/gpu.md), 13.4
GiB against 10.0 for the update."""
CARDS = {"24 GB": 23.6, "48 GB": 47.5, "8 x H100": 79.6}
"""GiB of a device as the driver shows it; the smallest of its kind."""
FEW = ("policy.tokens_per_micro_batch = 4096", "rollout.cache_gib = 4")
LORA = ("policy.model.adapter.rank = 16",)
FOUR = (*LORA, 'policy.model.adapter.base = "4bit"')
EIGHT = ("placement.pools = { main = 8 }",)
FSDP = (*EIGHT, "placement.train_parallel = { main = { fsdp = 8 } }")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe on a machine."""

    machine: str
    """Key of ``CARDS``."""
    model: str
    """Key of ``SHAPES``."""
    lines: tuple[str, ...] = ()
    """Settings that differ from the common recipe."""


CASES = (
    Case(machine="24 GB", model="0.5B"),
    Case(machine="24 GB", model="1.5B", lines=('policy.optimizer_dtype = "bfloat16"', *FEW)),
    Case(machine="24 GB", model="3B", lines=(*LORA, *FEW)),
    Case(machine="24 GB", model="7B", lines=(*LORA, *FEW)),
    Case(machine="24 GB", model="7B", lines=(*LORA, 'policy.model.adapter.base = "int8"', *FEW)),
    Case(machine="24 GB", model="7B", lines=(*FOUR, *FEW)),
    Case(machine="24 GB", model="14B", lines=(*FOUR, *FEW)),
    Case(
        machine="48 GB",
        model="7B",
        lines=(*LORA, "policy.tokens_per_micro_batch = 8192", "rollout.cache_gib = 8"),
    ),
    Case(machine="48 GB", model="14B", lines=(*FOUR, "rollout.cache_gib = 8")),
    Case(machine="48 GB", model="32B", lines=(*FOUR, *FEW)),
    Case(machine="8 x H100", model="7B", lines=EIGHT),
    Case(machine="8 x H100", model="7B", lines=FSDP),
    Case(machine="8 x H100", model="14B", lines=(*FSDP, "placement.rollout_parallel.tp = 2")),
    Case(
        machine="8 x H100",
        model="32B",
        lines=(*FSDP, "placement.rollout_parallel.tp = 4", *FEW, 'policy.optimizer_dtype = "bfloat16"'),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="file for the page")
    arguments = parser.parse_args()
    rows = ["| a device | model | lines of the recipe | kept | training | sampling | at most | fits |"]
    rows += ["|---|---|---|---|---|---|---|---|", *map(row, CASES)]
    print(text := "\n".join(rows))
    if arguments.write is not None:
        title = "# Memory of models on GPU machines"
        head = (
            f"`python benchmarks/planner/machines.py --write benchmarks/results/machines.md`: counts, not "
            f"measurements. Per device, {PROMPT} prompt and {ANSWER} answer tokens, 32 prompts of 8 samples. "
            f'"Fits": {MARGIN} times the estimate is in the device, the peak of the one case that was '
            "measured."
        )
        arguments.write.write_text(f"{title}\n\n{measured_at.line()}\n\n{head}\n\n{text}\n")


def row(case: Case) -> str:
    """Return the table's row of a case."""
    recipe, sizes = recipe_of(case), sizes_of(case.model)
    found = estimate(recipe, sizes, PROMPT + ANSWER)
    sums = {phase: size(sum(parts.values())) for phase, parts in found.phases.items()}
    room = CARDS[case.machine] * GIB / MARGIN
    lines = "<br>".join(f"`{line}`" for line in case.lines) or "none"
    cells = (
        f"{case.machine}: {CARDS[case.machine]} GiB",
        case.model,
        lines,
        size(sum(found.kept.values())),
        sums["trains"],
        sums["answers"],
        size(found.total),
        "yes" if found.total <= room else "no",
    )
    return f"| {' | '.join(cells)} |"


def recipe_of(case: Case) -> Resolved:
    """Return the recipe of a case, with the choices for a CUDA device."""
    sections: dict[str, Any] = {
        "run": {"device": "cuda"},
        "policy": {"model": {"path": f"Qwen/Qwen2.5-{case.model}"}},
        "rollout": {"max_tokens": ANSWER},
        "algorithm": {"name": "grpo", "steps": 100, "prompts_per_step": 32, "samples_per_prompt": 8},
    }
    return load_recipe(sections, [line.replace(" = ", "=", 1) for line in case.lines])


def sizes_of(model: str) -> ModelSizes:
    """Return the sizes of a model, from shapes without numbers."""
    shape = SHAPES[model]
    config = Qwen2Config(
        vocab_size=shape["words"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=32_768,
        tie_word_embeddings=model in TIED,
    )
    with torch.device("meta"):
        module = Qwen2ForCausalLM(config)
    found = sizes_from(config.to_dict(), {name: each.shape for name, each in module.named_parameters()})
    assert found is not None
    return found


if __name__ == "__main__":
    main()
