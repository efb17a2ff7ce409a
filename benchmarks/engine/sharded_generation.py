"""Generation by the native engine over tensor-parallel ranks, which are processes of this machine.

    tp 1    one process, one thread                          recorded, and never recorded
    tp t    t processes joined by gloo, one thread each      never recorded, because collectives cannot be

    python benchmarks/engine/sharded_generation.py                      # tp 1 and 2
    python benchmarks/engine/sharded_generation.py --tp 1 2 4 --rounds 3 --write results.md

Module and workload are those of engine/generation.py: Qwen2 with 3.3 million parameters, 64 rows of 64
new tokens. A second size, 27 million, shows the effect of a larger model. The column "speaking" is the time
that a rank spends in collectives, including waits for other ranks. Ranks of one machine share its cores and
memory bandwidth. Tensor parallelism therefore saves memory per rank here but no time; the table shows its
cost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMALLEST = []
SLOW = ["--tp 2 --sizes 3.3M --rounds 1"]  # starts ranks

WAIT_S = 600.0
SIZES = {"3.3M": (256, 768, 4), "27M": (768, 2304, 4)}
"""Hidden size, feed-forward size, layers."""


def main() -> None:
    arguments = _arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
    lines = _head(arguments)
    for name in arguments.sizes:
        lines += [
            "",
            f"## {name} parameters, 64 rows of 64, float32",
            "",
            "| ranks | tokens/s, median | fastest, slowest round | processor s, all ranks "
            "| speaking | weights per rank | cache per rank, in the end |",
            "|---|---|---|---|---|---|---|",
        ]
        for tp, recorded in [(1, True), *((tp, False) for tp in arguments.tp)]:
            lines.append(_line(tp, recorded, _together(tp, name, recorded, arguments.rounds)))
            print(lines[-1], flush=True)
    print("\n".join(lines))
    if arguments.write:
        Path(arguments.write).write_text("\n".join(lines) + "\n")


class Timed:
    """Ranks that measure the time of their collectives.

    Args:
        ranks: the wrapped ranks.
    """

    def __init__(self, ranks: Any) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        self.seconds = 0.0
        self.calls = 0

    def sum_(self, tensors: Sequence[Any]) -> None:
        """See Ranks."""
        self._timed(lambda: self.ranks.sum_(tensors))

    def gather(self, tensor: Any) -> Any:
        """See Ranks."""
        return self._timed(lambda: self.ranks.gather(tensor))

    def stack(self, tensor: Any) -> Any:
        """See Ranks."""
        return self._timed(lambda: self.ranks.stack(tensor))

    def part(self, groups: Sequence[Sequence[int]]) -> Any:
        """See Ranks."""
        return self.ranks.part(groups)

    def _timed(self, act: Any) -> Any:
        begin = time.perf_counter()
        found = act()
        self.seconds += time.perf_counter() - begin
        self.calls += 1
        return found


def own_weights(whole: Any, plan: Any, ranks: Any) -> dict[str, Any]:
    """Return a rank's shard of a whole decoder's weights."""
    from rillflow.models.sampling_shard import local_bounds

    bounds = local_bounds(whole, plan, ranks.rank, ranks.size) if ranks.size > 1 else {}
    return {
        name: weight.detach()[tuple(slice(*each) for each in bounds.get(name, ()))]
        for name, weight in whole.named_parameters()
    }


def measure(ranks: Any, name: str, recorded: bool, rounds: int) -> dict[str, Any]:
    """Return one rank's figures, without the warm-up round."""
    import torch
    from generation import CONTEXT, NEW, PROMPT, SLOTS, VOCABULARY, batch_of, workloads
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rillflow.models.attention import ATTENTION, register
    from rillflow.models.sampling_shard import assign, sampling_module
    from rillflow.models.tensor_plan import tensor_plan
    from rillflow.rollout.config import RolloutConfig
    from rillflow.rollout.native.engine import NativeEngine

    torch.set_num_threads(1)
    register()
    torch.manual_seed(0)
    hidden, inner, layers = SIZES[name]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64 // 2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    )
    whole = Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()
    plan, ranks = tensor_plan(whole), Timed(ranks)
    module = sampling_module(whole, plan, ranks)
    assign(module, own_weights(whole, plan, ranks))
    engine = NativeEngine(
        module,
        RolloutConfig(max_rows=SLOTS, max_tokens=NEW),
        stop_tokens=frozenset(),
        seed=0,
        context=CONTEXT,
        record_after=64 if recorded else float("inf"),
        workers=1,
        tp=ranks,
    )
    workload = workloads()[0]
    found: dict[str, Any] = {"seconds": [], "cpu_s": [], "speaking_s": []}
    for _ in range(rounds + 1):
        batch, limits = batch_of(workload)
        spoken, cpu, begin = ranks.seconds, time.process_time(), time.perf_counter()
        engine.generate(batch, sampling=limits)
        found["seconds"].append(time.perf_counter() - begin)
        found["cpu_s"].append(time.process_time() - cpu)
        found["speaking_s"].append(ranks.seconds - spoken)
    kept = {key: values[1:] for key, values in found.items()}
    weights = sum(parameter.nbytes for parameter in module.parameters())
    heads = config.num_key_value_heads // ranks.size
    cache = SLOTS * 128 * heads * 64 * 2 * 4 * layers  # positions come in blocks of 64
    assert PROMPT + NEW <= 128
    return {**kept, "weights": weights, "cache": cache}


def _line(tp: int, recorded: bool, found: list[dict[str, Any]]) -> str:
    from generation import NEW, SLOTS

    total, seconds = NEW * SLOTS, sorted(found[0]["seconds"])
    middle = statistics.median(seconds)
    cpu = sum(statistics.median(rank["cpu_s"]) for rank in found)
    speaking = statistics.median(found[0]["speaking_s"]) / middle
    what = f"{tp}{', recorded' if recorded else ''}"
    weights, cache = (found[0][name] / 2**20 for name in ("weights", "cache"))
    return (
        f"| {what} | {total / middle:,.0f} | {total / seconds[0]:,.0f}, {total / seconds[-1]:,.0f} "
        f"| {cpu:.2f} | {speaking:.0%} | {weights:.1f} MiB | {cache:.1f} MiB |"
    )


def _together(size: int, *arguments: Any) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        processes = [
            context.Process(target=_run, args=(said, rank, size, rendezvous, arguments), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found = dict(said.get(timeout=WAIT_S) for _ in processes)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(size)]


def _run(said: Any, rank: int, size: int, rendezvous: str, arguments: Any) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from rillflow.workers.collectives import ProcessRanks, SingleRank

    store = FileStore(rendezvous, size)
    ranks = SingleRank() if size == 1 else ProcessRanks.join(rank, size, store, deadline_s=WAIT_S)
    said.put((rank, measure(ranks, *arguments)))


def _head(arguments: argparse.Namespace) -> list[str]:
    import torch
    import transformers

    asked = f"--tp {' '.join(map(str, arguments.tp))} --rounds {arguments.rounds}"
    return [
        "# Generation over tensor-parallel ranks",
        "",
        "What is measured, and how: the head of `benchmarks/engine/sharded_generation.py`.",
        "",
        f"- command: `python benchmarks/engine/sharded_generation.py {asked}`",
        f"- machine: {os.cpu_count()} cores, one thread a rank, gloo over the loopback",
        f"- versions: torch {torch.__version__}, transformers {transformers.__version__}",
        f"- load at the start: {os.getloadavg()[0]:.1f} runnable processes beside it (1-minute average)",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="ranks that share the weights")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="models")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--write", help="a file for the tables")
    return parser.parse_args()


if __name__ == "__main__":
    main()
