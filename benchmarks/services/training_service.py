"""The training service beside the same work in process, and four clients beside one.

    client ─ HTTP ─> rillflow serve --train ─> tokens/s ┐
    the same adapter, passes and engine, in process ────┤ ratios
    four clients at once, each with its adapter ────────┘

    python benchmarks/services/training_service.py --write benchmarks/results/training_service.md  # 10 min

A training round is one ``forward_backward`` of --rows rows and one ``optim_step``, sent together as the
client recommends; a sampling round is --prompts requests of --samples samples each, all sent at once. The
client is the unmodified ``tinker`` package. Rounds before the first measured one are not counted.

SkyRL's server skyrl-tx 0.3.0 is not measured: it reads JSON, and the client 0.38 sends protobuf.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

SMALLEST = ["--hidden 32 --layers 2 --rows 2 --prompts 2 --samples 2 --length 16 --rounds 1"]
NEEDS = ["tinker", "rillflow_training_service"]

TOKEN = "a-token-of-the-benchmark"
WARM = 2
"""Rounds that are not counted."""


def written(folder: Path, given: argparse.Namespace) -> None:
    """Write a model of random weights that both servers load."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    names = ["<end>", *(f"w{index}" for index in range(1, 64))]
    inner = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=given.hidden // 4,
        max_position_embeddings=4 * given.length,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def running(command: list[str], folder: Path, sign: str) -> Iterator[None]:
    """Run a server until the block ends, from its line with a sign on."""
    log = folder / "server.log"
    with log.open("w") as file, subprocess.Popen(command, cwd=folder, stdout=file, stderr=file) as process:
        try:
            while sign not in log.read_text():
                if process.poll() is not None:
                    raise SystemExit(log.read_text()[-3000:])
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


class Client:
    """A client of the Tinker API with an adapter of its own."""

    def __init__(self, url: str, model: str, seed: int, given: argparse.Namespace) -> None:
        import tinker

        self._types, self._given = tinker.types, given
        service = tinker.ServiceClient(base_url=url, api_key=f"tml-{TOKEN}")
        flags = {} if given.unembed else {"train_unembed": False}
        self._client = service.create_lora_training_client(
            base_model=model, rank=given.rank, seed=seed, **flags
        ).result()
        self._data = [
            tinker.types.Datum(
                model_input=tinker.types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
            )
            for tokens in rows(given, seed)
        ]

    def train(self) -> int:
        """Do one round; return its tokens."""
        passed = self._client.forward_backward(self._data, "cross_entropy")
        stepped = self._client.optim_step(self._types.AdamParams(learning_rate=1e-4))
        passed.result(), stepped.result()
        return self._given.rows * (self._given.length - 1)

    def sample(self) -> int:
        """Do one round; return its sampled tokens."""
        given = self._given
        sampler = self._client.save_weights_and_get_sampling_client().result()
        how = self._types.SamplingParams(max_tokens=given.length, temperature=1.0, stop=[])
        futures = [
            sampler.sample(self._types.ModelInput.from_ints([*tokens[:8], at % 10]), given.samples, how)
            for at, tokens in enumerate(rows(given, given.prompts)[: given.prompts])
        ]
        return sum(len(each.tokens) for future in futures for each in future.result().sequences)


def rows(given: argparse.Namespace, seed: int) -> list[list[int]]:
    """Return random rows."""
    generator = torch.Generator().manual_seed(seed)
    count = max(given.rows, given.prompts)
    found: list[list[int]] = torch.randint(1, 40, (count, given.length), generator=generator).tolist()
    return found


def rate(round_of: Callable[[], int], rounds: int) -> float:
    """Return the tokens per second of the fastest round, which other programs disturbed least."""
    for _ in range(WARM):
        round_of()
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        count = round_of()
        found.append(count / (time.perf_counter() - begun))
    return max(found)


def together(rounds: list[Callable[[], int]]) -> Callable[[], int]:
    """Return a round of several clients at once."""
    threads = ThreadPoolExecutor(len(rounds))
    return lambda: sum(threads.map(lambda each: each(), rounds))


def in_process(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second of the same work without a server."""
    from rillflow.models.config import ModelConfig
    from rillflow.models.language_model import load_model
    from rillflow.records.batch import Batch, row_ids
    from rillflow.records.ragged import Ragged
    from rillflow.records.row import RowId
    from rillflow.rollout.config import RolloutConfig
    from rillflow.rollout.native.engine import NativeEngine
    from rillflow_training_service.datums import Datum
    from rillflow_training_service.losses import LOSSES
    from rillflow_training_service.shared_base import Shape, SharedBase
    from rillflow_training_service.tenant import AdamParams, Tenant

    device = torch.device("cpu")
    model = load_model(ModelConfig(path=str(folder / "model")), seed=0, device=device, base=Path())
    tenant = Tenant.new("a", SharedBase(model), Shape(rank=given.rank, unembed=given.unembed), seed=0)
    data = [
        Datum(
            tokens=torch.tensor(each[:-1]),
            targets=torch.tensor(each[1:]),
            inputs={"weights": torch.ones(len(each) - 1)},
        )
        for each in rows(given, 0)
    ]

    def train() -> int:
        found = tenant.run(data, LOSSES["cross_entropy"], {}, learns=True)
        tenant.step(AdamParams())
        return found.num_tokens

    found = {"train": rate(train, given.rounds)}
    for name, fixed in (("sample", True), ("sample, other shapes", False)):
        config = RolloutConfig(max_rows=given.max_rows, deterministic=fixed, max_tokens=given.length)
        tenant.enter()
        context = model.context
        engine = NativeEngine(model.module, config, stop_tokens=frozenset(), seed=0, context=context)
        prompts = [
            [*each[:8], at % 10] for at, each in enumerate(rows(given, given.prompts)[: given.prompts])
        ]
        batch = Batch(
            ids=row_ids([RowId(0, index, 0) for index in range(len(prompts))]),
            fields={"tokens": Ragged.from_rows(prompts), "columns": Ragged.from_text(["{}"] * len(prompts))},
        )

        def sample(engine: NativeEngine = engine, batch: Batch = batch) -> int:
            made = engine.generate(batch, samples=given.samples)
            return int(made.ragged("loss_mask").values.sum())

        found[name] = rate(sample, given.rounds)
    return found


def served(url: str, model: str, given: argparse.Namespace, counts: tuple[int, ...]) -> dict[str, float]:
    """Return tokens per second of one and more clients, together."""
    found = dict[str, float]()
    for count in counts:
        clients = [Client(url, model, seed, given) for seed in range(count)]
        found[f"train {count}"] = rate(together([each.train for each in clients]), given.rounds)
        found[f"sample {count}"] = rate(together([each.sample for each in clients]), given.rounds)
    return found


def measured(given: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Return tokens per second by setting."""
    written(folder / "model", given)
    (folder / "token").write_text(TOKEN)
    port = str(given.port)
    words = ["serve", "model", "--train", "--port", port, "--token-file", "token"]
    words += ["--max-rows", str(given.max_rows)]
    command = [sys.executable, "-m", "rillflow.cli.main", *words]
    found = {"in process": in_process(folder, given)}
    with running(command, folder, "TINKER_BASE_URL"):
        found["service"] = served(f"http://127.0.0.1:{port}", "model", given, (1, 4))
    return found


def page(found: dict[str, dict[str, float]], given: argparse.Namespace, words: str) -> str:
    """Return the results as a page."""
    own, service = found["in process"], found["service"]
    lines = [
        "# The training service",
        "",
        f"`python benchmarks/services/training_service.py {words}`, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.0f}, Python {platform.python_version()}, torch {version('torch')}, "
        f"tinker {version('tinker')}.",
        "",
        f"A Qwen3 of {given.layers} layers, hidden size {given.hidden}, vocabulary {given.vocabulary:,}; "
        f"rank {given.rank}; {given.rows} rows of {given.length} tokens; {given.prompts} prompts with "
        f"{given.samples} samples of {given.length} tokens. Tokens per second, the fastest of "
        f"{given.rounds} rounds.",
        "",
        "| setting | training | of in process | sampling | of in process |",
        "|---|---:|---:|---:|---:|",
        f"| in process | {own['train']:,.0f} | 1 | {own['sample']:,.0f} | 1 |",
    ]
    settings = [("service, one client", service, 1), ("service, four clients at once", service, 4)]
    for name, rates, count in settings:
        train, sample = rates[f"train {count}"], rates[f"sample {count}"]
        lines.append(
            f"| {name} | {train:,.0f} | {train / own['train']:.2f} | {sample:,.0f} "
            f"| {sample / own['sample']:.2f} |"
        )
    other = own["sample, other shapes"]
    lines += [
        "",
        "The service samples with fixed shapes, so that a row has the same bits in any batch. In process and "
        f"without fixed shapes, the same rows run at {other:,.0f} tokens per second "
        f"({other / own['sample']:.2f} times as many).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--hidden", type=int, default=256, help="hidden size (256)")
    add("--layers", type=int, default=6, help="layers (6)")
    add("--vocabulary", type=int, default=4096, help="vocabulary (4096)")
    add("--rank", type=int, default=16, help="rank of the adapters (16)")
    add("--unembed", action="store_true", help="adapt the head, too")
    add("--rows", type=int, default=32, help="rows of a training round (32)")
    add("--prompts", type=int, default=8, help="prompts of a sampling round (8)")
    add("--samples", type=int, default=8, help="samples of each prompt (8)")
    add("--length", type=int, default=128, help="tokens of a row, and of a sample (128)")
    add("--max-rows", type=int, default=64, help="rows of a sampling pass (64)")
    add("--rounds", type=int, default=5, help="measured rounds (5)")
    add("--port", type=int, default=18790, help="port of the service (18790)")
    add("--write", type=Path, help="the page to write; printed if left out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(given, Path(folder))
    from measured_at import below_title, line

    text = below_title(page(found, given, " ".join(sys.argv[1:])), line())
    if given.write:
        given.write.write_text(text, "utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
