"""Accuracy and bytes of data-parallel training with each codec of gradients, over seeds.

    4 ranks (threads) ─ gradients of own rows ─ CodedSum ─ mean ─ AdamW ─> held-out accuracy, achieved ratio

    python benchmarks/links/gradients.py

Digits are scikit-learn's (1,797 of 8 x 8), four fifths for training; network 64-512-256-10. Ratios are bytes
of float32 gradients over bytes of payloads, headers and tensors that are sent whole included. ``random`` is a
control of the selection: it sends as many values as top_k, drawn at random, with error feedback.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rillflow.sharding.codec import Codec, CodedSum, State
from rillflow.workers.collectives import ThreadGroup, ThreadRanks
from rillflow_links.codecs.rounded import Int8
from rillflow_links.codecs.sparse_loco import SparseLoco
from rillflow_links.codecs.top_k import Dct, TopK, kept

sys.path.insert(0, str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = ["--seeds 2 --steps 4 --codecs dense top_k random"]
NEEDS = ["sklearn", "rillflow_links"]
RANKS, BATCH, RATE, DEADLINE_S = 4, 128, 2e-3, 300.0
Data = tuple[Tensor, Tensor]


class RandomK(TopK):
    """As many values as TopK, drawn at random."""

    def _chosen(self, wanted: Tensor, state: State) -> Tensor:
        del state
        places = torch.randperm(wanted.numel())[: kept(self._share, wanted.numel())]
        return places[wanted[places] != 0].sort().values


class Forgetful:
    """A codec without its error feedback.

    Args:
        inner: the codec.
    """

    def __init__(self, inner: Codec) -> None:
        self._inner = inner

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec."""
        payload = self._inner.encode(tensor, state)
        state.pop("error", None)
        return payload

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec."""
        self._inner.decode(payload, into, state)


CODECS: dict[str, Callable[[float], Codec | None]] = {
    "dense": lambda _: None,
    "int8": lambda _: Int8(),
    "top_k": TopK,
    "dct, lifespan 10": lambda share: Dct(share, 10),
    "dct, lifespan 100": lambda share: Dct(share, 100),
    "dct, lifespan 100, no error feedback": lambda share: Forgetful(Dct(share, 100)),
    "random": RandomK,
    "sparse_loco": SparseLoco,
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run."""

    accuracy: float
    """Percent of held-out rows that are right."""
    ratio: float
    """Bytes of all gradients over the bytes that were sent."""


def network(seed: int) -> nn.Sequential:
    """Return a network with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def digits(seed: int) -> tuple[Data, Data]:
    """Return inputs and labels for training, and held-out ones."""
    from sklearn.datasets import load_digits

    table = load_digits()
    inputs, labels = torch.tensor(table.data).float() / 16, torch.tensor(table.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    held, own = order[: len(order) // 5], order[len(order) // 5 :]
    return (inputs[own], labels[own]), (inputs[held], labels[held])


def trained(codec: Codec | None, seed: int, steps: int) -> Trained:
    """Train one network on all ranks' mean gradient."""
    (inputs, labels), (held_inputs, held_labels) = digits(seed)
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    group, totals = ThreadGroup(RANKS, DEADLINE_S), [0, 0]
    sums = [CodedSum(codec) for _ in range(RANKS)] if codec else []
    parameters = dict(model.named_parameters())
    with ThreadPoolExecutor(RANKS) as threads:
        for _ in range(steps):
            rows = torch.randint(len(inputs), (BATCH,), generator=generator).chunk(RANKS)
            gradients = []
            for own in rows:
                loss = nn.functional.cross_entropy(model(inputs[own]), labels[own])
                own_gradients = torch.autograd.grad(loss, [*parameters.values()])
                gradients.append(dict(zip(parameters, own_gradients, strict=True)))
            if codec:
                calls = [
                    threads.submit(each.sum_, ThreadRanks(group, rank), gradients[rank])
                    for rank, each in enumerate(sums)
                ]
                for call in calls:
                    call.result()
                for each in sums:
                    metrics = each.metrics()
                    totals[0] += int(metrics["links/gradient_bytes/mean"].total)
                    totals[1] += int(metrics["links/gradient_sent_bytes/mean"].total)
                total = gradients[0]
            else:
                total = {name: sum(each[name] for each in gradients) for name in parameters}
            for name, each in parameters.items():
                each.grad = total[name] / RANKS
            optimizer.step()
    right = (model(held_inputs).argmax(1) == held_labels).double().mean()
    return Trained(accuracy=100 * float(right), ratio=totals[0] / totals[1] if codec else 1.0)


def standard_error(values: list[float]) -> float:
    """Return the standard error of a mean; 0 for one value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def row(name: str, runs: list[Trained], dense: list[Trained]) -> str:
    """Return the line of a codec; differences are of equal seeds."""
    differences = [one.accuracy - two.accuracy for one, two in zip(runs, dense, strict=True)]
    accuracy = statistics.fmean(each.accuracy for each in runs)
    ratio = statistics.fmean(each.ratio for each in runs)
    return (
        f"| {name} | {accuracy:.2f} | {statistics.fmean(differences):+.2f} "
        f"({standard_error(differences):.2f}) | {ratio:.1f}x |"
    )


def page(names: list[str], seeds: int, steps: int, share: float) -> str:
    """Return the page; the first codec is the one that others are compared with."""
    runs: dict[str, list[Trained]] = {}
    lines = [
        "# Gradients through codecs",
        "",
        f"`python benchmarks/links/gradients.py --seeds {seeds} --steps {steps} --share {share:g}`, Python "
        f"{platform.python_version()}, torch {torch.__version__}. Digits, {RANKS} ranks, batch {BATCH}, "
        f"AdamW {RATE:g}, {seeds} seeds; share {share:g} of the values.",
        "",
        f"| codec | accuracy, % | difference to {names[0]}, points (standard error) | achieved ratio |",
        "|---|---|---|---|",
    ]
    for name in names:
        runs[name] = [trained(CODECS[name](share), seed, steps) for seed in range(seeds)]
        lines.append(row(name, runs[name], runs[names[0]]))
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train with every codec, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = page(arguments.codecs, arguments.seeds, arguments.steps, arguments.share)
    if arguments.write:
        arguments.write.write_text(below_title(text, line()), "utf-8")


if __name__ == "__main__":
    main()
