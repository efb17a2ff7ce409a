"""Direction and length of expected updates against the policy gradient, by enumeration of every action.

    python benchmarks/training/gradient_directions.py
    python benchmarks/training/gradient_directions.py --write benchmarks/results/gradient_directions.md

    sampler mu ─ every action, by its probability ─> policy_loss ─ gradient of the logits ─┐
    policy pi  ─ every action, by its probability ─> the policy gradient ──────────────────┴─> cosine, length

A policy is a softmax over actions with normal logits; an action has a normal reward, and the advantage is the
reward minus the sampler's mean. Stale: the sampler's logits differ from the policy's by normal noise. Cut:
the sampler draws from a part of the policy's actions, and its log probabilities are the policy's. Nothing is
sampled, so the only error is the draw of policies.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.formulas.config import PolicyLossConfig
from rillflow.formulas.losses import policy_loss

sys.path.append(str(Path(__file__).parents[1]))
from measured_at import line

SMALLEST = ["--draws 3"]

STALE: dict[str, tuple[dict[str, Any], bool]] = {
    '`correction = "none"`, `old_logprobs = "trainer"`': ({}, False),
    'the default: `old_logprobs = "sampler"`, the clip bounds policy / sampler': ({}, True),
    '`correction = "tis"`, bounds [0, 2]': ({"correction": "tis"}, False),
    '`correction = "tis"`, bounds [0, 5] (decoupled)': (
        {"correction": "tis", "correction_bounds": (0, 5)},
        False,
    ),
}
"""Settings of the loss, and whether the ratio is taken against the sampler."""
CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "`top_p = 0.95`": lambda shares: top_p(shares, 0.95),
    "`top_p = 0.8`": lambda shares: top_p(shares, 0.8),
    "`top_p = 0.5`": lambda shares: top_p(shares, 0.5),
    "`top_k = 5`": lambda shares: shares >= shares.sort(descending=True).values[4],
    "`min_p = 0.05`": lambda shares: shares >= 0.05 * shares.max(),
}
"""The actions that a setting keeps, of the policy's probabilities."""


def main() -> None:
    arguments = _arguments()
    lines = ["# Directions of expected updates", "", line(), "", *page(arguments.draws)]
    print("\n".join(lines))
    if arguments.write:
        Path(arguments.write).write_text("\n".join(lines) + "\n")


def page(draws: int) -> list[str]:
    """Return the tables for so many drawn policies."""
    command = "python benchmarks/training/gradient_directions.py" + (
        f" --draws {draws}" if draws != 200 else ""
    )
    found = [
        f"`{command}`: {draws} policies a row. Cosine with the policy gradient",
        "at the present weights, and length over its length: medians, and in brackets the tenth and",
        "ninetieth percentile. An update without bias has 1 and 1. Nothing is sampled.",
        "",
        "**Stale rows**, 12 actions; the sampler's logits differ from the policy's by a deviation of s:",
        "",
        "| loss | s | cosine | length |",
        "|---|---|---|---|",
    ]
    for moved in (0.3, 1.0):
        for name, (settings, is_sampler) in STALE.items():
            draw = torch.Generator().manual_seed(0)
            pairs = [stale(draw, moved, settings, is_sampler=is_sampler) for _ in range(draws)]
            found.append(f"| {name} | {moved:g} | {told(pairs)} |")
    found += [
        "",
        "**Cut sampling**, 64 actions, logits of deviation 2, on-policy otherwise:",
        "",
        "| setting | cosine | length |",
        "|---|---|---|",
    ]
    for name, kept in CUTS.items():
        draw = torch.Generator().manual_seed(0)
        found.append(f"| {name} | {told([cut(draw, kept) for _ in range(draws)])} |")
    return found


def stale(
    draw: torch.Generator, moved: float, settings: dict[str, Any], *, is_sampler: bool
) -> tuple[float, float]:
    """Return cosine and length of an update from rows of another policy."""
    logits, noise, rewards = (torch.randn(12, generator=draw, dtype=torch.float64) for _ in range(3))
    sampler = (logits + moved * noise).log_softmax(0)
    old = sampler if is_sampler else logits.log_softmax(0)
    update = expected(logits, rewards, sampler.exp(), sampler, old, PolicyLossConfig(**settings))
    return against(update, policy_gradient(logits, rewards))


def cut(draw: torch.Generator, kept: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Return cosine and length of an update from rows of a part of the policy's actions."""
    logits, rewards = (torch.randn(64, generator=draw, dtype=torch.float64) for _ in range(2))
    policy = (2 * logits).log_softmax(0)
    shares = torch.where(kept(policy.exp()), policy.exp(), 0)
    update = expected(2 * logits, rewards, shares / shares.sum(), policy, policy, PolicyLossConfig())
    return against(update, policy_gradient(2 * logits, rewards))


def policy_gradient(logits: Tensor, rewards: Tensor) -> Tensor:
    """Return the gradient of the expected reward, in closed form."""
    shares = logits.softmax(0)
    return shares * (rewards - shares @ rewards)


def expected(
    logits: Tensor, rewards: Tensor, shares: Tensor, sampler: Tensor, old: Tensor, config: PolicyLossConfig
) -> Tensor:
    """Return minus the gradient of the loss of every action, weighted by the sampler's probabilities."""
    trained = logits.clone().requires_grad_()
    losses = policy_loss(
        trained.log_softmax(0),
        torch.zeros_like(logits),
        rewards - shares @ rewards,
        sampler,
        old,
        torch.ones(len(logits), dtype=torch.long),
        config=config,
    ).losses
    (shares @ losses).backward()  # type: ignore[no-untyped-call]
    assert trained.grad is not None
    return -trained.grad


def against(update: Tensor, true: Tensor) -> tuple[float, float]:
    """Return the cosine of two directions, 0 if there is no update, and the ratio of their lengths."""
    length = float(update.norm())
    cosine = float(update @ true / true.norm()) / length if length > 1e-12 else 0.0
    return cosine, length / float(true.norm())


def top_p(shares: Tensor, mass: float) -> Tensor:
    """Return which actions are the fewest likeliest ones that hold the mass."""
    order = shares.argsort(descending=True)
    before = shares[order].cumsum(0) - shares[order]
    kept = torch.zeros_like(shares, dtype=torch.bool)
    kept[order[before < mass]] = True
    return kept


def told(pairs: list[tuple[float, float]]) -> str:
    """Return the cells of a row: cosine and length."""
    cells = []
    for values in zip(*pairs, strict=True):
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        cells.append(f"{statistics.median(values):.2f} [{tenths[0]:.2f}, {tenths[-1]:.2f}]")
    return " | ".join(cells)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draws", type=int, default=200, help="policies of each row")
    parser.add_argument("--write", metavar="FILE", help="write the page")
    return parser.parse_args()


if __name__ == "__main__":
    main()
