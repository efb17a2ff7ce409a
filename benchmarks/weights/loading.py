"""Loading a model over ranks: host memory and seconds if each rank reads its slices, or the whole model.

    slices    outline on the meta device ─ cut ─ each rank reads its own slices      (as a run does)
    whole     each rank reads the whole model, then cuts it

    python benchmarks/weights/loading.py                                     # a gigabyte on 4 ranks: a minute
    python benchmarks/weights/loading.py --write benchmarks/results/loading.md

Ranks are processes of this machine on gloo. The model is a Qwen2 in float32, in files of 256 MB as
save_pretrained writes them. They are read once before, so that the page cache holds them. A rank's peak is
the growth of its resident memory (VmHWM, with pages of files) from the moment when all ranks have met. Linux
only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

SMALLEST = []
SLOW = ["--layers 4 --hidden 512"]  # starts four processes for each mesh

RANKS = 4
MESHES = {
    "tp 4": {"tp": 4},
    "pp 4": {"pp": 4},
    "fsdp 4": {"dp": 4, "fsdp": 4},
    "pp 2, tp 2": {"pp": 2, "tp": 2},
}
MIB = 2**20


def made(folder: Path, layers: int, hidden: int) -> int:
    """Write the model; return the bytes of its weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rillflow.models.bare import character_tokenizer
    from rillflow.models.tokenizer import Tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    module = Qwen2ForCausalLM(config)
    module.save_pretrained(folder, max_shard_size="256MB")
    Tokenizer(character_tokenizer("0123456789", 1024), stop_tokens=[0]).save(folder)
    return sum(parameter.nbytes for parameter in module.parameters())


def resident(kind: str) -> int:
    """Return resident bytes of this process: VmRSS now, or VmHWM, the peak since the last ``forgotten``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def forgotten() -> int:
    """Reset the peak of resident memory; return the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def load(said: Any, rank: int, meeting: str, folder: str, sizes: dict[str, int], is_whole: bool) -> None:
    """Load one rank's share; put its growth in bytes, the bytes of its weights, and seconds."""
    import torch
    import torch.distributed as dist

    from rillflow.models.config import ModelConfig
    from rillflow.models.language_model import LanguageModel, outline
    from rillflow.roles.model_shard import ModelShard
    from rillflow.workers.collectives import ProcessRanks
    from rillflow.workers.config import MeshSizes

    torch.set_num_threads(1)
    ranks = ProcessRanks.join(rank, RANKS, dist.FileStore(meeting, RANKS), deadline_s=600)
    ranks.gather(torch.zeros(1))
    base, began = forgotten(), time.monotonic()
    config = ModelConfig(path=folder)
    where: dict[str, Any] = {"device": torch.device("cpu"), "base": Path(), "section": "policy.model"}
    model = outline(LanguageModel, config, seed=0, **where)
    share = ModelShard.of(model.read() if is_whole else model, MeshSizes(**sizes), ranks)
    seconds = time.monotonic() - began
    own = {held.untyped_storage().data_ptr(): held for held in share.parallel.local_weights().values()}
    kept = sum(held.untyped_storage().nbytes() for held in own.values())
    said.put((resident("VmHWM") - base, kept, seconds))
    ranks.gather(torch.zeros(1))


def together(folder: Path, sizes: dict[str, int], is_whole: bool) -> tuple[int, int, float]:
    """Return the largest values of any rank: growth in bytes, bytes of its weights, seconds."""
    context = multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (str(Path(meeting) / "meeting"), str(folder), sizes, is_whole)
        ranks = [context.Process(target=load, args=(said, rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        found = [said.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
    grown, kept, seconds = zip(*found, strict=True)
    return max(grown), max(kept), max(seconds)


def main() -> None:
    """Measure all meshes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--write", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    folder = Path(tempfile.mkdtemp())
    try:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:  # a separate process, so that its memory is freed
            size = pool.apply(made, (folder, arguments.layers, arguments.hidden))
        for file in folder.glob("*.safetensors"):
            file.read_bytes()
        lines = [
            "# Loading a model over ranks",
            "",
            f"Command: `python benchmarks/weights/loading.py`; {len(os.sched_getaffinity(0))} cores of a "
            f"{platform.machine()}, torch {version('torch')}, transformers {version('transformers')}.",
            f"Weights of {size / MIB:.0f} MiB, {RANKS} ranks; the most of any rank.",
            "",
            "| mesh | rank's weights, MiB | way | peak over the base, MiB | of the model | seconds |",
            "|---|---|---|---|---|---|",
        ]
        for name, sizes in MESHES.items():
            for way, is_whole in (("slices", False), ("whole", True)):
                grown, kept, seconds = together(folder, sizes, is_whole)
                share = f"{kept / MIB:.0f} | {way} | {grown / MIB:.0f} | {grown / size:.0%}"
                lines.append(f"| {name} | {share} | {seconds:.1f} |")
                print(lines[-1], flush=True)
    finally:
        shutil.rmtree(folder)
    text = "\n".join([*lines, ""])
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
