"""Transfers of weights to remote samplers, in memory, with everything that goes wrong on the way.

    trainer: WeightFolder, differences ─ faulty fetch ─> samplers: WeightCopy ─ SHA-256 of every weight

    python benchmarks/links/transfers.py --write benchmarks/results/link_transfers.md    # 1 min

Each transfer is one ``update`` of a random sampler to the newest version. Faults of a fetch: a flipped byte,
a lost answer, half an answer, an old answer again, and a kill between two files of an update. A killed
sampler begins without weights, or goes on with what it holds. Others join late. Sometimes the run starts
again at an older version with other values. Everything is drawn from one seed.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import RillflowError
from rillflow.models.model_files import write_tensors
from rillflow_links.codecs.delta import Delta
from rillflow_links.remote.transport import Unreachable
from rillflow_links.remote.weight_copy import WeightCopy
from rillflow_service.weight_differences import WeightDifferences, tensor_digest
from rillflow_service.weight_folder import WeightFolder

sys.path.insert(0, str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = ["--transfers 50"]
NEEDS = ["rillflow_links", "rillflow_service"]
FILES = {"model-1.safetensors": ("a", "b"), "model-2.safetensors": ("c",)}
FAULTS = ("flipped", "lost", "half", "old", "killed")


class Killed(Exception):
    """The sampler's process died."""


@dataclass(kw_only=True)
class TransferReport:
    """Counts of transfers and injected faults."""

    transfers: int = 0
    """Updates that ended with the newest version."""
    wrong: int = 0
    """Updates after which a weight had other bits than the run's."""
    attempts: int = 0
    """Updates that were tried."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Transfers by kind: whole, or difference."""
    faults: Counter[str] = field(default_factory=Counter)
    """Injected faults by name."""
    recovered: int = 0
    """Transfers in which a damaged difference was replaced by whole weights."""


class TrainerSide:
    """A run that publishes: every version changes some values; it may start again.

    Args:
        folder: folder of its files.
        draw: random numbers.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._folder, self._draw, self._lives = folder, draw, 0
        self.weights = {name: torch.randn(40, 30).to(torch.bfloat16) for name in "abc"}
        self.restart(-1)

    def restart(self, version: int) -> None:
        """Begin another life, whose next version follows ``version``."""
        self._lives += 1
        self.folder = WeightFolder(self._folder / str(self._lives))
        self._differences = WeightDifferences(Delta(50), self.folder)
        self.version = version
        self.publish()

    def publish(self) -> None:
        """Change about 2 % of the values, and publish them."""
        for weight in self.weights.values():
            changed = torch.rand(weight.shape) < 0.02
            weight[changed] += torch.randn(int(changed.sum())).to(torch.bfloat16) * 0.01
        self.version += 1
        arriving = self.folder.arriving(self.version)
        for file, names in FILES.items():
            tensors = {name: self.weights[name] for name in names}
            self.folder.arrived[file] = write_tensors(arriving / file, tensors)
            self._differences.add(self.version, file, tensors)
        more = {"session": f"life {self._lives}", **self._differences.finish(self.version)}
        self.folder.publish(self.version, [*FILES], more)

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the newest weights."""
        return {name: tensor_digest(each) for name, each in self.weights.items()}


class FaultyFetch:
    """Reads files of a trainer, with faults.

    Args:
        trainer: the trainer.
        draw: random numbers.
        rate: probability of a fault of one file.
        faults: counts them.
    """

    def __init__(self, trainer: TrainerSide, draw: random.Random, rate: float, faults: Counter[str]) -> None:
        self._trainer, self._draw, self._rate, self._faults = trainer, draw, rate, faults
        self._old: dict[str, bytes] = {}

    def __call__(self, version: int, name: str) -> bytes:
        """Return a file's bytes, or damaged ones.

        Raises:
            Killed, Unreachable: such a fault was drawn.
        """
        data = self._trainer.folder.path(version, name).read_bytes()
        before = self._old.get(name, b"")
        self._old[name] = data
        if self._draw.random() >= self._rate:
            return data
        fault = self._draw.choice(FAULTS)
        self._faults[fault] += 1
        if fault == "killed":
            raise Killed
        if fault == "lost":
            raise Unreachable("lost")
        if fault == "half":
            return data[: len(data) // 2]
        if fault == "old":
            return before
        place = self._draw.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << self._draw.randrange(8)]) + data[place + 1 :]


def transfers(count: int, *, seed: int = 0, rate: float = 0.15, samplers: int = 4) -> TransferReport:
    """Return what ``count`` transfers came to."""
    draw, report = random.Random(seed), TransferReport()
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TrainerSide(Path(folder), draw)
        fetch = FaultyFetch(trainer, draw, rate, report.faults)
        copies = [_fresh(report) for _ in range(samplers)]
        while report.transfers < count:
            happens = draw.random()
            if happens < 0.02:
                trainer.restart(max(-1, trainer.version - 3))
            elif happens < 0.5:
                trainer.publish()
            place = draw.randrange(samplers)
            if happens > 0.97:
                copies[place] = _fresh(report)  # one that joins late
            _transfer(copies, place, trainer, fetch, report, draw)
    return report


def _fresh(report: TransferReport) -> WeightCopy:
    def recovered(_: str) -> None:
        report.recovered += 1

    return WeightCopy(Delta(1), recovered)


def _transfer(
    copies: list[WeightCopy],
    place: int,
    trainer: TrainerSide,
    fetch: FaultyFetch,
    report: TransferReport,
    draw: random.Random,
) -> None:
    """Bring one sampler to the newest version, however often that fails."""
    session = (trainer.folder.manifest(-1) or {})["session"]
    while (copy := copies[place]).version != trainer.version or copy.session != session:
        report.attempts += 1
        manifest: dict[str, Any] | None = trainer.folder.manifest(-1)
        assert manifest is not None, "a version is published"
        try:
            update = copy.update(manifest, fetch)
        except Killed:
            if draw.random() < 0.5:
                copies[place] = _fresh(report)
            continue
        except RillflowError:
            continue
        report.transfers += 1
        report.kinds["whole" if update.base < 0 else "difference"] += 1
        report.wrong += _digests(copy.held) != trainer.digests


def _digests(held: dict[str, Tensor]) -> dict[str, str]:
    return {name: tensor_digest(each) for name, each in held.items()}


def page(report: TransferReport, words: str) -> str:
    """Return the results page."""
    rows = [
        ("transfers that ended with the newest version", report.transfers),
        ("... by difference", report.kinds["difference"]),
        ("... whole", report.kinds["whole"]),
        ("attempts", report.attempts),
        *((f"injected: {name}", report.faults[name]) for name in FAULTS),
        ("damaged differences replaced by whole weights", report.recovered),
        ("**transfers with wrong bits**", report.wrong),
    ]
    table = "\n".join(f"| {name} | {count:,} |" for name, count in rows)
    return (
        "# Transfers of weights with faults\n\n"
        f"`{words}`, Python {platform.python_version()}, torch {torch.__version__}.\n\n"
        "Every transfer is checked weight by weight, by SHA-256, against the run's own tensors. Counts "
        "do not depend on the machine.\n\n"
        f"| | count |\n|---|---|\n{table}\n"
    )


def main() -> None:
    """Run the transfers, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transfers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    report = transfers(arguments.transfers, seed=arguments.seed)
    how = f"--transfers {arguments.transfers} --seed {arguments.seed}"
    words = f"python benchmarks/links/transfers.py {how}"
    text = page(report, words)
    if arguments.write:
        arguments.write.write_text(below_title(text, line()))
    else:
        print(text)
    if report.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
