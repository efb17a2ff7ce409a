"""Detection of samplers that cheat: how often the run's check of log probabilities finds them.

    honest, older weights, int8 weights, another temperature ─ NativeEngine ─> rows ─ LogprobCheck ─> refused?

    python benchmarks/links/detection.py --write benchmarks/results/link_detection.md    # some minutes

Every row is checked once, which gives the probability d that a checked row is refused. A run checks the share
p of the rows, and always a client's first one with each version. So n rows of one version are found with
probability 1 - (1 - d) (1 - p d)^(n - 1); for the honest sampler this is the probability of a false alarm.
The model is new, with weights large enough for peaked distributions. "Older" is the model before some AdamW
steps on its own samples.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow_service.requests import SampledRow
from rillflow_service.row_checks import LogprobCheck
from rillflow_service.row_leases import Offered, RefusedRow

sys.path.insert(0, str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = ["--rows 6 --hidden 32 --tokens 6 --dtypes float32"]
NEEDS = ["rillflow_links", "rillflow_service"]
SHARES = (0.01, 0.05, 0.2)
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-*= .,()"
PROMPT = 8


@dataclass(frozen=True, kw_only=True)
class Cheat:
    """A kind of sampler."""

    name: str
    """Name in the table."""
    weights: Callable[[nn.Module], None] | None = None
    """Changes the sampler's weights; None for the run's."""
    temperature: float = 1.0
    """Temperature that it samples and reports with; the run asks for 1."""


def int8(module: nn.Module) -> None:
    """Round every matrix to int8 with one scale per row, as a quantised engine does."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim == 2:
                scale = weight.abs().amax(1, keepdim=True).float() / 127
                weight.copy_((weight.float() / scale).round() * scale)


def trained(module: nn.Module, rows: list[list[int]], steps: int, lr: float) -> None:
    """Take AdamW steps in float32 on rows of tokens, and round to the module's type."""
    master = copy.deepcopy(module).float()
    optimiser = torch.optim.AdamW(master.parameters(), lr=lr)
    ids = torch.tensor(rows)
    for step in range(steps):
        loss = master(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
        sign = torch.where(torch.arange(len(ids)) % 2 == step % 2, 1.0, -1.0)
        (loss[..., 0].mean(1) * sign).mean().neg().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        for own, new in zip(module.parameters(), master.parameters(), strict=True):
            own.copy_(new)


def sampled(model: LanguageModel, rows: int, tokens: int, temperature: float, seed: int) -> list[Rollout]:
    """Return rows that the native engine samples together, as a sampler on another machine does."""
    engine = NativeEngine(
        model.module,
        RolloutConfig(max_rows=64),
        stop_tokens=frozenset(),
        seed=seed,
        context=model.context,
    )
    draw = torch.Generator().manual_seed(seed)
    for row in range(rows):
        prompt = torch.randint(1, len(ALPHABET), (PROMPT,), generator=draw).tolist()
        sampling = SamplingConfig(temperature=temperature, max_tokens=tokens)
        engine.add(Rollout.start(RowId(0, row, 0), prompt), sampling)
    ended: list[Rollout] = []
    while engine.has_work:
        ended += engine.step()
    return ended


def refused(check: LogprobCheck, rollout: Rollout) -> bool:
    """Return whether the run refuses a row."""
    start = Rollout.start(rollout.row, rollout.tokens[:PROMPT])
    most = len(rollout.tokens) - PROMPT
    offered = Offered(rollout=start, temperature=1.0, most=most, oldest=0, seed=0)
    row = SampledRow(
        row=rollout.row.prompt,
        version=0,
        tokens=list(rollout.tokens[PROMPT:]),
        logprobs=list(rollout.logprobs[PROMPT:]),
        finish="stop" if rollout.finish is Finish.STOP else "length",
    )
    try:
        check.check(row, offered, "sampler")
    except RefusedRow:
        return True
    return False


def measured(dtype: str, arguments: argparse.Namespace) -> list[tuple[str, float]]:
    """Return the share of refused rows by kind of sampler."""
    new = NewModel(
        hidden=arguments.hidden,
        layers=2,
        heads=4,
        kv_heads=2,
        context=PROMPT + arguments.tokens,
        alphabet=ALPHABET,
        init_std=0.2,
    )
    config = ModelConfig.model_validate({"new": new, "dtype": dtype})
    older = load_model(config, seed=0, device=torch.device("cpu"), base=Path())
    rows = [list(each.tokens) for each in sampled(older, 8, arguments.tokens, 1.0, 7)]
    shares = []
    for steps in arguments.older:
        model = load_model(config, seed=0, device=torch.device("cpu"), base=Path())
        trained(model.module, rows, steps, arguments.lr)
        shares.append((f"weights {steps} steps older", _share(model, older, Cheat(name=""), arguments)))
    cheats = [
        Cheat(name="honest"),
        Cheat(name="int8 weights", weights=int8),
        Cheat(name="temperature 0.9", temperature=0.9),
        Cheat(name="temperature 0.99", temperature=0.99),
    ]
    others = []
    for cheat in cheats:
        model = load_model(config, seed=0, device=torch.device("cpu"), base=Path())
        if cheat.weights is not None:
            cheat.weights(model.module)
        others.append((cheat.name, _share(older, model, cheat, arguments)))
    return [*others[:1], *shares, *others[1:]]


def _share(run: LanguageModel, sampler: LanguageModel, cheat: Cheat, arguments: argparse.Namespace) -> float:
    check = LogprobCheck(run.module, share=1.0, tolerance=None, seed=1)
    ended = sampled(sampler, arguments.rows, arguments.tokens, cheat.temperature, 3)
    return sum(refused(check, each) for each in ended) / len(ended)


def found(d: float, share: float, rows: int) -> float:
    """Return the probability that one of ``rows`` rows of a version is refused."""
    return 1 - (1 - d) * (1 - share * d) ** (rows - 1)


def page(results: dict[str, list[tuple[str, float]]], arguments: argparse.Namespace, words: str) -> str:
    """Return the results page."""
    heads = " | ".join(f"share {share:g}" for share in SHARES)
    rows = [
        f"| {dtype} | {name} | {d:.3f} | "
        + " | ".join(f"{found(d, share, arguments.of):.3f}" for share in SHARES)
        + " |"
        for dtype, kinds in results.items()
        for name, d in kinds
    ]
    return (
        "# Detection of samplers that cheat\n\n"
        f"`{words}`, Python {platform.python_version()}, torch {torch.__version__}; {arguments.rows} rows of "
        f"{arguments.tokens} tokens each, learning rate {arguments.lr:g}.\n\n"
        "The third column is the probability that a checked row is refused. The others are the probability "
        f"that one of {arguments.of} rows with one version is refused, by `rollout.service.check_share`; for "
        "the honest sampler, a false alarm.\n\n"
        f"| dtype | sampler | checked row | {heads} |\n|---|---|---|{'---|' * len(SHARES)}\n"
        + "\n".join(rows)
        + "\n"
    )


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200, help="rows of each sampler")
    parser.add_argument("--of", type=int, default=64, help="rows of a version in the table")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--older", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    results = {dtype: measured(dtype, arguments) for dtype in arguments.dtypes}
    text = page(results, arguments, "python benchmarks/links/detection.py")
    if arguments.write:
        arguments.write.write_text(below_title(text, line()))
    else:
        print(text)


if __name__ == "__main__":
    main()
