"""A damaged file of somebody else, of every kind, is refused in words by ``check`` and by ``run``.

A seed draws the damage. Whether a file is refused depends on it: a changed weight may be a good weight. What
never happens: a traceback, a wait, or much memory.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rillflow.cli.main import main
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model

SEED = 49
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
RECIPE = """
[run]
threads = 1
[task]
source = "rows.SUFFIX"
held_out = 0
[policy.model]
path = "adapter"
[rollout]
max_tokens = 3
[reward]
function = "reward.py:reward"
[algorithm]
name = "grpo"
steps = 1
prompts_per_step = 2
samples_per_prompt = 2
[evaluate]
problems = 0
"""
FILES = (
    *(f"base/{name}" for name in ("config.json", "generation_config.json", "model.safetensors")),
    *(f"adapter/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")),
    *(f"adapter/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
    *("rows.jsonl", "rows.parquet"),
)
HOW = (
    "truncated",
    "flipped",
    "empty",
    "zeros",
    "html",
    "other json",
    "deep",
    "doubled",
    "a folder",
    "a link",
)
MOST_S, MOST_BYTES = 60.0, 1 << 30


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, an adapter with its own tokeniser, rows of both kinds and a recipe."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("sound")
    new = NewModel(hidden=16, layers=1, heads=2, kv_heads=1, context=32)
    cpu = torch.device("cpu")
    save_model(load_model(ModelConfig(new=new), seed=0, device=cpu, base=Path()), folder / "base")
    config = ModelConfig(path=str(folder / "base"), adapter=AdapterConfig(rank=2))
    save_model(load_model(config, seed=0, device=cpu, base=Path()), folder / "adapter")
    settings = folder / "adapter" / "adapter_config.json"
    named = {**json.loads(settings.read_text()), "base_model_name_or_path": "../base"}
    settings.write_text(json.dumps(named))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "adapter")
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "reward.py").write_text("def reward(completions):\n    return [0.0 for _ in completions]\n")
    for suffix in ("jsonl", "parquet"):
        (folder / f"{suffix}.toml").write_text(RECIPE.replace("SUFFIX", suffix))
    return folder


def damage(file: Path, how: str, draw: random.Random) -> None:
    """Damage a file in one of the ways of ``HOW``."""
    content = file.read_bytes()
    file.unlink()
    match how:
        case "truncated":
            file.write_bytes(content[: draw.randrange(1, len(content))])
        case "flipped":
            changed = bytearray(content)
            for _ in range(1 + len(content) // 100):
                changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            file.write_bytes(changed)
        case "empty":
            file.touch()
        case "zeros":
            file.write_bytes(bytes(len(content)))
        case "html":
            file.write_text("<!doctype html><title>404 Not Found</title>")
        case "other json":
            file.write_text(draw.choice(['{"a": [1, null]}', "[]", "null", "1e400", '"text"', "{}"]))
        case "deep":
            file.write_text("[" * 50_000 + "]" * 50_000)
        case "doubled":
            file.write_bytes(content * 2)
        case "a folder":
            file.mkdir()
        case _:
            file.symlink_to("nowhere")


CASES = [(file, how) for file in FILES for how in HOW]
"""Every file with every damage."""
EVERYDAY = [
    pytest.param(each, marks=[] if place % 3 == 0 else pytest.mark.slow) for place, each in enumerate(CASES)
]
"""Every third one in the everyday tests."""


@pytest.fixture
def damaged(sound: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a copy of the folder with one damaged file; the recipe that reads it is run.toml."""
    file, how = request.param
    folder = tmp_path / "here"
    shutil.copytree(sound, folder)
    shutil.copy(folder / f"{'parquet' if file.endswith('parquet') else 'jsonl'}.toml", folder / "run.toml")
    damage(folder / file, how, random.Random(f"{SEED} {file} {how}"))
    return folder


@pytest.mark.parametrize("damaged", EVERYDAY, indirect=True, ids=lambda case: f"{case[0]} {case[1]}")
def test_check_names_a_damaged_file_or_reads_it(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    code = main(["check", str(damaged / "run.toml")])
    said = "".join(capsys.readouterr())
    assert code in (0, 1, 2) and "bug in Rillflow" not in said and "Traceback" not in said, said
    assert code == 0 or "error: " in said
    assert time.monotonic() - began < MOST_S


@pytest.mark.slow
@pytest.mark.parametrize("damaged", CASES, indirect=True, ids=lambda case: f"{case[0]} {case[1]}")
def test_a_run_names_a_damaged_file_or_trains_on_it(damaged: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rillflow.cli.main",
        "run",
        str(damaged / "run.toml"),
        "--dir",
        str(damaged / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S * 5, check=False)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1, 2) and "bug in Rillflow" not in said and "Traceback" not in said, said
    assert done.returncode == 0 or "error: " in said
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4 * MOST_BYTES
