"""Merging separately trained models: the quality of the result, and the memory and speed of the merge.

    digits    ─ two networks ─┬─ plain average, optimal transport by weights, by activations ─> accuracy
    decoders  ─ two decoders ─┴─ the same, before and after 5% more training ─────────────────> loss
    memory    ─ two directories of 1 GB ─ merge ─> peak memory, MB/s compared with a copy of the same bytes

    python benchmarks/weights/merging.py digits decoders memory --write benchmarks/results/merging.md # 20 min

Digits are scikit-learn's (1,797 of 8 x 8), four fifths for training; networks 64-128-64-10, AdamW. --write
replaces the sections of the parts that ran and keeps the others.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from rillflow_merging.merge import MergeSettings, merge
from rillflow_merging.transport import Dense, fuse

SMALLEST = ["digits --seeds 2"]
NEEDS = ["sklearn", "rillflow_merging"]

SIZES = (64, 128, 64, 10)
EPOCHS, RATE, DECAY, ROWS = 40, 1e-3, 0.3, 32
SPECIAL = 4
"""The digit that only one network sees in the runs with different data."""
TRAINED, TUNED = 1_500, 75
"""Steps of a decoder's training, and of the training after a merge."""
ALPHABET = "0123456789+="
PROBE = """
import resource, sys
from pathlib import Path
import torch
from rillflow_merging.merge import MergeSettings, merge
from rillflow.app import merged
before = int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
import time
start = time.perf_counter()
merge([Path(sys.argv[1]), Path(sys.argv[2])], Path(sys.argv[3]), MergeSettings(method=sys.argv[4]),
      Path(sys.argv[5]) if len(sys.argv) > 5 else None)
took = time.perf_counter() - start
after = int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
print((after - before) / 2**10, took)
"""


def network(seed: int) -> nn.Sequential:
    """Return a network with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(one, two) for one, two in itertools.pairwise(SIZES)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def train(model: nn.Sequential, inputs: Tensor, labels: Tensor, seed: int) -> nn.Sequential:
    """Train the model for all epochs and return it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs), generator=generator).split(ROWS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    return model


def layers_of(model: nn.Sequential) -> list[Dense]:
    """Return the linear layers of a network."""
    parts = [part for part in model if isinstance(part, nn.Linear)]
    return [Dense(weight=part.weight.detach().double(), bias=part.bias.detach().double()) for part in parts]


def plain(networks: Sequence[Sequence[Dense]]) -> list[Dense]:
    """Return the average of the weights without reordering units."""
    return [
        Dense(weight=sum(each.weight for each in at) / len(at), bias=sum(each.bias for each in at) / len(at))
        for at in zip(*networks, strict=True)
    ]


def accuracy(layers: Sequence[Dense], inputs: Tensor, labels: Tensor) -> float:
    """Return the percentage of correct rows."""
    states = inputs.double()
    for place, layer in enumerate(layers):
        states = states @ layer.weight.T + layer.bias
        states = states.relu() if place + 1 < len(layers) else states
    return 100 * float((states.argmax(1) == labels).double().mean())


def digits(seeds: int) -> list[str]:
    """Return the section of the digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs, labels = torch.tensor(found.data).float() / 16, torch.tensor(found.target)
    rows: dict[str, list[list[float]]] = {
        "different starts": [],
        f"digit {SPECIAL} with one": [],
        "one start": [],
    }
    changed = 0.0
    for seed in range(seeds):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
        held, own = order[: len(order) // 5], order[len(order) // 5 :]
        test, x, y = (inputs[held], labels[held]), inputs[own], labels[own]
        pairs = {"different starts": [train(network(10 * seed + k), x, y, 10 * seed + k) for k in (1, 2)]}
        pairs["one start"] = [train(network(10 * seed), x, y, 10 * seed + k) for k in (3, 4)]
        has = (y == SPECIAL).nonzero()[:, 0]
        others = (y != SPECIAL).nonzero()[:, 0]
        few = others[torch.arange(len(others)) % 10 == 0]
        most = others[torch.arange(len(others)) % 10 != 0]
        parts = (torch.cat([has, few]), most)
        pairs[f"digit {SPECIAL} with one"] = [
            train(network(10 * seed + 5 + k), x[part], y[part], 10 * seed + k) for k, part in enumerate(parts)
        ]
        for name, pair in pairs.items():
            networks = [layers_of(each) for each in pair]
            made = [*networks, plain(networks), fuse(networks), fuse(networks, inputs=x)]
            rows[name].append([accuracy(each, *test) for each in made])
        networks = [layers_of(each) for each in pairs["different starts"]]
        swapped = [permuted(networks[0], seed), networks[1]]
        for how in ({}, {"inputs": x}):
            one, two = fuse(networks, **how), fuse(swapped, **how)
            changed = max(
                changed, *(float((a.weight - b.weight).abs().max()) for a, b in zip(one, two, strict=True))
            )
    lines = [
        "| parents | first | second | plain average | OT by weights | OT by activations |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {' | '.join(spread(column) for column in zip(*each, strict=True))} |"
        for name, each in rows.items()
    ]
    told = f"Percent of held-out digits, mean and standard deviation of {seeds} seeds. "
    told += "Hidden units of the first network permuted:"
    return [*lines, "", f"{told} no weight of the merged one differs by more than {changed:.1e}."]


def permuted(layers: Sequence[Dense], seed: int) -> list[Dense]:
    """Return the same function with permuted hidden units."""
    generator, before, found = torch.Generator().manual_seed(seed), None, []
    for place, layer in enumerate(layers):
        weight = layer.weight if before is None else layer.weight[:, before]
        before = torch.arange(len(weight))
        if place + 1 < len(layers):
            before = torch.randperm(len(weight), generator=generator)
        found.append(Dense(weight=weight[before], bias=layer.bias[before]))
    return found


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation as text."""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"


def sums(seed: int, count: int) -> list[str]:
    """Return two-digit sums with their answers."""
    drawn = torch.randint(0, 100, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    return [f"{one}+{two}={one + two}" for one, two in drawn]


def decoders(seeds: int) -> list[str]:
    """Return the section of the decoders."""
    lines = [
        "| seed | first | second | merged by | loss | after 5% of the training |",
        "|---|---|---|---|---|---|",
    ]
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / str(k) for k in range(2)]
            losses = [learn(path, None, 2 * seed + k, TRAINED) for k, path in enumerate(paths)]
            for name, how, texts in (
                ("plain average", MergeSettings(), []),
                ("OT by weights", MergeSettings(method="ot"), []),
                ("OT by activations", MergeSettings(method="ot"), sums(99, 200)),
                ("OT by activations, reg 0.03", MergeSettings(method="ot", reg=0.03), sums(99, 200)),
            ):
                out = Path(folder) / re.sub(r"\W", "-", name)
                merge(paths, out, how, texts=texts)
                before, after = learn(None, out, 7, 0), learn(None, out, 7, TUNED)
                lines.append(
                    f"| {seed} | {losses[0]:.3f} | {losses[1]:.3f} | {name} | {before:.3f} | {after:.3f} |"
                )
                print(lines[-1], flush=True)
    told = f"Loss of the answers of 500 held-out sums; {TRAINED} steps of 64 rows, {TUNED} after the merge."
    return [*lines, "", told]


def learn(out: Path | None, start: Path | None, seed: int, steps: int) -> float:
    """Train a decoder on sums, save it, and return its held-out loss."""
    from rillflow.models.config import ModelConfig, NewModel
    from rillflow.models.language_model import load_model, save_model

    new = NewModel(hidden=64, layers=2, heads=4, kv_heads=2, context=16, alphabet=ALPHABET)
    config = ModelConfig(new=new) if start is None else ModelConfig(path=str(start))
    model = load_model(config, seed=seed, device=torch.device("cpu"), base=Path())
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3 if start is None else 1e-3)
    pool = torch.stack([row_of(model.tokenizer, text) for text in sums(1_000 + seed, 20_000)])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model.module, pool[torch.randint(0, len(pool), (64,), generator=generator)]).backward()
        nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
    if out is not None:
        save_model(model, out)
    with torch.no_grad():
        held = torch.stack([row_of(model.tokenizer, text) for text in sums(5, 500)])
        return float(loss_of(model.module, held))


def row_of(tokenizer: object, text: str) -> Tensor:
    """Return a sum as [10] tokens, padded with the end token, 0."""
    tokens = tokenizer.encode(text)  # type: ignore[attr-defined]
    return torch.tensor(tokens + [0] * (10 - len(tokens)))


def loss_of(module: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean loss of the tokens after the equals sign, including the first end token."""
    logits = module(input_ids=rows[:, :-1]).logits
    equals = ALPHABET.index("=") + 1
    behind = (rows == equals).cumsum(1)[:, :-1] > 0
    is_answer = behind & ((rows[:, 1:] != 0) | (rows[:, :-1] != 0))
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    return (losses * is_answer).sum() / is_answer.sum()


def memory(_: int) -> list[str]:
    """Return the section of memory and speed."""
    from safetensors.torch import save_file

    lines = [
        "| what | highest memory over the process's own | seconds | MB/s read and written |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DISK")) as folder:
        paths = [Path(folder) / name for name in ("a", "b", "base")]
        for seed, path in enumerate(paths):
            path.mkdir()
            (path / "config.json").write_text('{"model_type": "qwen2"}')
            generator = torch.Generator().manual_seed(seed)
            weights = {
                f"model.layers.{layer}.mlp.{name}_proj.weight": torch.randn(2048, 5504, generator=generator)
                for layer in range(8)
                for name in ("gate", "up", "down")
            }
            save_file(weights, path / "model.safetensors", {"format": "pt"})
        size = (paths[0] / "model.safetensors").stat().st_size
        pair = 2 * 2048 * 5504 * 4 / 2**20
        for name, base in (("linear", None), ("slerp", paths[2]), ("ties", paths[2])):
            lines.append(probed(name, name, paths[:2], base))
        start = time.perf_counter()
        for number in range(2):
            copy(paths[number] / "model.safetensors", Path(folder) / f"copy{number}")
        took = time.perf_counter() - start
        lines.append(f"| copying both parents | | {took:.1f} | {4 * size / 2**20 / took:.0f} |")
        small = decoders_of(Path(folder), hidden=512, inner=1536, layers=8)
        taken = small[0].stat().st_size / 2**20
        parents = [each.parent for each in small]
        lines += [probed(f"{name}, decoders", name, parents, None) for name in ("linear", "ot")]
    told = f"Two models of {size / 2**30:.2f} GiB in float32; the largest tensor pair takes {pair:.0f} MiB. "
    return [*lines, "", f"{told}Two decoders of {taken:.0f} MiB: 8 layers of 512, feed-forward 1,536."]


def probed(shown: str, method: str, parents: Sequence[Path], base: Path | None) -> str:
    """Merge in a separate process; return the line of the table."""
    beside = [str(base)] if base else []
    words = [*map(str, parents), str(parents[0].parent / f"{parents[0].name}-{method}"), method, *beside]
    done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=True)
    peak, took = map(float, done.stdout.split())
    moved = (3 + len(beside)) * sum(each.stat().st_size for each in parents[0].glob("*.safetensors")) / 2**20
    return f"| {shown} | {peak:.0f} MiB | {took:.1f} | {moved / took:.0f} |"


def decoders_of(folder: Path, *, hidden: int, inner: int, layers: int) -> list[Path]:
    """Write two decoders with random weights; return their weight files."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        config = Qwen2Config(vocab_size=8192, num_attention_heads=8, num_key_value_heads=4, **sizes)
        Qwen2ForCausalLM(config).save_pretrained(folder / f"decoder{seed}")
        found.append(folder / f"decoder{seed}" / "model.safetensors")
    return found


def copy(source: Path, target: Path) -> None:
    """Copy a file and sync it to disk, as a merge does."""
    with source.open("rb") as read, target.open("wb") as written:
        while piece := read.read(2**22):
            written.write(piece)
        written.flush()
        os.fsync(written.fileno())


PARTS: dict[str, tuple[str, Callable[[int], list[str]], int]] = {
    "digits": ("Digits", digits, 10),
    "decoders": ("Decoders trained apart", decoders, 3),
    "memory": ("Memory and speed", memory, 1),
}


def write(path: Path, part: str, lines: Sequence[str], seeds: int) -> None:
    """Replace a part's section in the page."""
    title = PARTS[part][0]
    head = "# Merging\n\nEach section says its command; the settings are at the head of the script.\n"
    text = path.read_text("utf-8") if path.exists() else head
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    machine += f", torch {version('torch')}, POT {version('POT')}"
    command = f"`python benchmarks/weights/merging.py {part} --seeds {seeds} --write {path}`, {machine}."
    section = "\n".join([f"## {title}", "", command, "", *lines, ""])
    sections = {
        match: f"{match}{body}" for match, body in re.findall(r"(## [^\n]+)(.*?)(?=\n## |\Z)", text, re.S)
    }
    sections[f"## {title}"] = section.rstrip()
    order = [f"## {each[0]}" for each in PARTS.values()]
    path.write_text(
        head + "\n" + "\n\n".join(sections[each].rstrip() for each in order if each in sections) + "\n"
    )


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, help="how many; 10 of digits, 3 of decoders")
    parser.add_argument("--write", type=Path, help="where the results go")
    arguments = parser.parse_args()
    for part in arguments.parts or PARTS:
        seeds = arguments.seeds or PARTS[part][2]
        lines = PARTS[part][1](seeds)
        print("\n".join(lines), flush=True)
        if arguments.write is not None:
            write(arguments.write, part, lines, seeds)


if __name__ == "__main__":
    main()
