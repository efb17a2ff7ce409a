"""Rillflow's formulas against verl's and TRL's own code, and whole updates against a plain loop.

    random batches ─ safetensors ─┬─> peers/verl_formulas.py, in verl's environment ─┐
                                  ├─> peers/trl_formulas.py, in TRL's ───────────────┼─> largest difference
                                  └─> rillflow.formulas ─────────────────────────────┘
    runs of every algorithm, updates off the policy ──> whole_updates.py against plain_updates.py

    python -m venv .verl && .verl/bin/pip install "torch>=2.10,<=2.13.0" transformers ray tensordict \\
        hydra-core omegaconf codetiming datasets peft orjson && .verl/bin/pip install --no-deps verl==0.9.1
    python -m venv .trl && .trl/bin/pip install trl==1.16.0
    python benchmarks/training/differential.py --verl-python .verl/bin/python --trl-python .trl/bin/python
    python benchmarks/training/differential.py --only updates   # the plain loop alone, no peer: three minutes

Compares values, and gradients of the log probabilities, in float64 and float32. The batches have gaps,
abstained rows, flat groups and clipped tokens. A difference is divided by the largest entry if that is above
1. Where definitions differ, EXPLAINED states the difference and the comparison removes it. Exit status 1
means that a difference exceeds 1e-6.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from formula_batches import CREDIT, Scene, Tensors, adaptive_weights, batch_of, ours, scenes
from safetensors.torch import load_file, save_file
from torch import Tensor
from whole_updates import LIMIT, Compared, off_policy, whole_runs

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = ["--seeds 1 --only formulas"]

HERE = Path(__file__).parent
EPSILON = {"verl": 1e-6, "TRL": 1e-4}
"""The constant that a peer adds to a group's standard deviation; Rillflow adds 1e-6."""
EXPLAINED = {
    "D1": "verl gives a group's only scored row its raw reward, Rillflow and TRL 0: that row is left out",
    "D2": "TRL adds 1e-4 to a group's deviation, Rillflow and verl 1e-6: rescaled to one constant",
    "D3": "verl holds k3 within 10: tokens beyond are left out, and no loss here has any",
    "D4": "verl divides by sqrt(var + 1e-8), Rillflow by std + 1e-6: rescaled to one of them",
    "D6": "TRL divides by all rows, Rillflow and verl by those with a loss token: rescaled",
    "D8": "CISPO's value: Rillflow weighs log r, the peers log pi; the constant is taken off",
}
NOT_COMPARED = """Not compared, because the definitions are not the same: verl's controller observes a
mean a token, Rillflow the sum of a row (D5; the update is compared); TRL's advantages of tokens under a row's
ratio (D7); TRL's entropy bonus is a mean over tokens in every aggregation (D9; compared there); TRL's RLOO
clips a row's ratio (D10); equal rewards are exactly 0 here, verl's are a rounding over 1e-6 (D11; not met in
groups of four); verl's managers pay a row that ends with a tool's token where no advantage looks (D12; here
paid at the last sampled token)."""


@dataclass(kw_only=True)
class Found:
    """Largest differences of a quantity over all batches."""

    raw: float = 0.0
    """Largest difference, with the known ones."""
    left: dict[str, float]
    """Largest remaining difference for each dtype, without the known ones."""
    explained: set[str]
    """Keys of the entries of EXPLAINED that applied."""


def main() -> None:
    """Compare, print and exit."""
    arguments = _arguments()
    torch.set_num_threads(1)
    lines, worst = _head(), 0.0
    peers = {"verl": arguments.verl_python, "TRL": arguments.trl_python}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.only != "updates":
            known = _given(folder, arguments.seeds)
            for peer, python in peers.items():
                if python is None:
                    lines += ["", f"{peer} was not compared: no --{peer.lower()}-python."]
                    continue
                found = against(peer, python, folder, known)
                worst = max([worst, *(each for one in found.values() for each in one.left.values())])
                lines += ["", *_table(peer, python, found)]
            lines += ["", *(f"- {key}: {text}." for key, text in EXPLAINED.items()), "", NOT_COMPARED]
        if arguments.only != "formulas":
            updates = [*_shown(off_policy()), *_shown(whole_runs(folder))]
            worst = max([worst, *(update.difference for update in updates)])
            lines += ["", *_updates(updates)]
    text = "\n".join([*lines, "", f"Worst: {worst:.1e}; the limit is {LIMIT:g}.", ""])
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text)
    sys.exit(not worst <= LIMIT)


def _given(folder: Path, seeds: int) -> dict[str, tuple[Scene, Tensors, Tensors]]:
    """Write the batches to a file; return them with Rillflow's results."""
    known = {}
    for scene in scenes(seeds):
        batch = batch_of(scene)
        known[scene.name] = (scene, batch, ours(batch))
    flat = {
        f"{name}/{field}": value for name, (_, batch, _) in known.items() for field, value in batch.items()
    }
    save_file(
        {name: value.contiguous().clone() for name, value in flat.items()}, folder / "given.safetensors"
    )
    return known


def against(
    peer: str, python: str, folder: Path, known: dict[str, tuple[Scene, Tensors, Tensors]]
) -> dict[str, Found]:
    """Run a peer's script and return the largest difference of each quantity."""
    made = folder / f"{peer}.safetensors"
    script = HERE / "peers" / f"{peer.lower()}_formulas.py"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [python, str(script), str(folder / "given.safetensors"), str(made)], check=True, env=environment
    )
    found: dict[str, Found] = {}
    for name, theirs in load_file(made).items():
        where, _, quantity = name.partition("/")
        if where == "controller":
            mine = adaptive_weights(torch.linspace(0, 0.4, 50).tolist())
            left = {"float64": float((mine - theirs).abs().max())}
            found[quantity] = Found(raw=left["float64"], left=left, explained=set())
            continue
        scene, batch, results = known[where]
        one = found.setdefault(family(quantity), Found(left={}, explained=set()))
        mine, theirs = aligned(quantity, peer, batch, results[quantity], theirs)
        one.raw = max(one.raw, distance(mine, theirs))
        mine, theirs = agreed(quantity, peer, batch, results, mine, theirs, one.explained)
        dtype = str(scene.dtype).removeprefix("torch.")
        one.left[dtype] = max(one.left.get(dtype, 0.0), distance(mine, theirs))
    return found


def family(quantity: str) -> str:
    """Return a quantity's name in the table: one line for all gammas, values apart from gradients."""
    name, _, gradient = quantity.partition("/")
    words = [word for word in name.split(", ") if not word.replace(".", "").isdigit()]
    return ", ".join(words) + (", gradient" if gradient else "")


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, divided by the largest entry if that is above 1."""
    scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
    return float((one.double() - other.double()).abs().max()) / scale if other.numel() else 0.0


def aligned(quantity: str, peer: str, batch: Tensors, mine: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries that both have: verl has only scored rows, tokens instead of rows, and no masks."""
    if mine.dim() == 0 or peer == "TRL":
        return mine, theirs
    if theirs.shape[0] != len(mine) or "/" not in quantity:
        mine = mine[batch["valid"]] if theirs.shape[0] != len(mine) else mine
        mask = batch["mask"][batch["valid"]] if theirs.shape[0] == len(mine) else batch["mask"]
        mine = mine[:, None].expand_as(mask) if mine.dim() == 1 else mine
        return mine * mask, theirs * mask
    return mine, theirs


def agreed(
    quantity: str,
    peer: str,
    batch: Tensors,
    results: Tensors,
    mine: Tensor,
    theirs: Tensor,
    explained: set[str],
) -> tuple[Tensor, Tensor]:
    """Return both under one definition, after removing the differences of EXPLAINED."""
    name, _, gradient = quantity.partition("/")
    if peer == "verl" and name in ("GRPO, std", "GRPO, off", "RLOO"):
        scored = batch["groups"][batch["valid"]]
        alone = (scored[:, None] == scored).sum(1) == 1
        if bool(alone.any()):
            explained.add("D1")
        return mine[~alone], theirs[~alone]
    if peer == "TRL" and name == "GRPO, std":
        explained.add("D2")
        deviation = _deviations(batch).to(mine.dtype)
        return mine, theirs * (deviation + EPSILON["TRL"]) / (deviation + EPSILON["verl"])
    if name == "token rewards less divergence, k3":
        ratio = (batch["sampler"] - batch["reference"])[batch["valid"]].double()
        inside = torch.expm1(-ratio) + ratio < 10
        if not bool(inside.all()):
            explained.add("D3")
        return mine * inside, theirs * inside
    if peer == "verl" and "whitened" in name:
        explained.add("D4")
        return mine, theirs * _rescaling(name, batch, results)
    if name.startswith("CISPO") and not gradient:
        explained.add("D8")
        return mine + _left_of_old(name, batch), theirs
    if peer == "TRL" and name.endswith(("sequence_mean", "constant")):
        counted = float(batch["mask"].any(1).sum())
        if counted < len(batch["mask"]):
            explained.add("D6")
        return mine, theirs * len(batch["mask"]) / counted
    return mine, theirs


def _deviations(batch: Tensors) -> Tensor:
    """Return the standard deviation of each row's group, [B]; 1 for a group of fewer than two scored rows."""
    found = torch.ones(len(batch["rewards"]), dtype=torch.float64)
    for group in batch["groups"].unique():
        rows = (batch["groups"] == group) & batch["valid"]
        if int(rows.sum()) > 1:
            found[batch["groups"] == group] = batch["rewards"][rows].double().std()
    return found


def _rescaling(name: str, batch: Tensors, results: Tensors) -> float:
    """Return the factor from a division by sqrt(var + 1e-8) to one by std + 1e-6."""
    before = {f"GAE, whitened, {gamma}, {lam}": f"GAE, {gamma}, {lam}" for gamma, lam in CREDIT}
    plain = results[before[name] if name in before else name.replace("whitened", "returns")]
    counted = batch["mask"] & batch["valid"][:, None]
    variance = float(plain[counted].double().var())
    return (variance + 1e-8) ** 0.5 / (variance**0.5 + 1e-6)


def _left_of_old(name: str, batch: Tensors) -> Tensor:
    """Return the aggregated constant by which -w A log r exceeds -w A log pi."""
    mask = batch["mask"]
    low, high = (0.0, 1.28) if "one bound" in name else (0.8, 1.28)
    weight = (batch["now"] - batch["old"]).clamp(-20, 20).exp().clamp(low, high)
    advantages = batch["token_advantages"] if "tokens" in name else batch["advantages"][:, None]
    terms = (weight * advantages * batch["old"] * mask).double()
    tokens, rows = mask.sum(1).clamp_min(1), int(mask.any(1).sum())
    if name.endswith("sequence_mean"):
        return -(terms.sum(1) / tokens).sum() / rows
    total = rows * int(batch["constant"]) if name.endswith("constant") else int(mask.sum())
    return -terms.sum() / total


def _shown(updates: Iterator[Compared]) -> Iterator[Compared]:
    for update in updates:
        print(f"{update.name}: {update.difference:.1e}", file=sys.stderr, flush=True)
        yield update


def _head() -> list[str]:
    names = ("torch", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
    return [
        "# Formulas and gradients, against other code",
        "",
        measured_at.line(),
        "",
        f"`python {' '.join(sys.argv)}`; {machine}.",
    ]


def _table(peer: str, python: str, found: dict[str, Found]) -> list[str]:
    asked = f"import importlib.metadata as m; print(m.version({peer.lower()!r}), m.version('torch'))"
    said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    lines = [
        f"## {peer} {said[0]}, torch {said[1]}",
        "",
        "| quantity | as they come | explained | left, float64 | left, float32 |",
        "|---|---|---|---|---|",
    ]
    for name, one in sorted(found.items()):
        left = [f"{one.left[dtype]:.0e}" if dtype in one.left else "" for dtype in ("float64", "float32")]
        why = ", ".join(sorted(one.explained))
        lines.append(f"| {name} | {one.raw:.0e} | {why} | {left[0]} | {left[1]} |")
    return lines


def _updates(updates: Sequence[Compared]) -> list[str]:
    return [
        "## Whole updates against a plain loop",
        "",
        "Gradients of all weights. The first are `Trainer.update` in float64 on rows of an older policy,",
        "whole and cut; the others are second steps of runs of `rillflow run` in float32, from their files.",
        "",
        "| update | largest gradient | difference |",
        "|---|---|---|",
        *(f"| {each.name} | {each.largest:.2f} | {each.difference:.0e} |" for each in updates),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--verl-python", metavar="PYTHON", help="an interpreter that has verl")
    parser.add_argument("--trl-python", metavar="PYTHON", help="an interpreter that has TRL")
    parser.add_argument("--seeds", type=int, default=12, help="batches of each scenario and dtype (12)")
    parser.add_argument("--only", choices=["formulas", "updates"], help="one half")
    parser.add_argument("--write", metavar="FILE", help="where the table goes, besides the screen")
    return parser.parse_args()


if __name__ == "__main__":
    main()
