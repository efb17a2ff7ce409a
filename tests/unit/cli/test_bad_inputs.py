"""User mistakes: every case has its input, the exit code, and words of the error.

No case starts a run: nothing is trained, no directory is left behind, and a case takes a second at most.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast as _loaded  # noqa: F401  not part of any case's time

from rillflow.app import check, launch  # noqa: F401  not part of any case's time
from rillflow.cli.main import main

LIMIT_S = 1.0
"""CPU seconds of a case; conversations are rendered by transformers, whose import takes another second."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
REWARD = """
def brief(prompts, completions, **_):
    return [1.0 / (1 + len(text)) for text in completions]

def other(prompts, completions, solution, **_):
    return [0.0 for _ in completions]

text = "no function"
"""
TOML = """
[task]
source = "prompts.jsonl"
held_out = 4

[policy]
model.path = "model"

[rollout]
max_tokens = 8

[reward]
function = "reward.py:brief"

[algorithm]
name = "grpo"
steps = 2
prompts_per_step = 4

[run]
dir = "out"
"""
Spoil = Callable[[Path], object]


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [{"prompt": f"say {number}: ", "answer": str(number)} for number in range(count)]


def write_rows(folder: Path, lines: list[Any]) -> None:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    (folder / "prompts.jsonl").write_text(text)


def write_model(folder: Path) -> None:
    """Write a Llama of two layers and its byte-level tokenizer, as plain files."""
    model = folder / "model"
    model.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: at for at, piece in enumerate(["</s>", *alphabet])}, []))
    backend.add_special_tokens(["</s>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(alphabet) + 1,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (model / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8)}
    shapes |= {"self_attn.o_proj": (8, 8), "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8)}
    shapes |= {"mlp.down_proj": (8, 16), "input_layernorm": (8,), "post_attention_layernorm": (8,)}
    weights = {f"model.layers.{at}.{name}.weight": shape for at in range(2) for name, shape in shapes.items()}
    weights |= {"model.embed_tokens.weight": (len(alphabet) + 1, 8), "model.norm.weight": (8,)}
    arrays = {name: np.full(shape, 0.1, np.float32) for name, shape in weights.items()}
    save_file(arrays, model / "model.safetensors", metadata={"format": "pt"})


def drop_weight(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def cut(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def set_json(file: str, **changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / file
        old = json.loads(path.read_text())
        path.write_text(
            json.dumps({key: value for key, value in {**old, **changes}.items() if value is not None})
        )

    return spoil


def text(file: str, content: str | bytes) -> Spoil:
    return lambda folder: (folder / file).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def data(*lines: Any, at: int = 0) -> Spoil:
    """Return the usual rows with other rows from an index (from 0) on."""
    return lambda folder: write_rows(folder, [*rows()[:at], *lines, *rows()[at + len(lines) :]])


def nothing(folder: Path) -> None:
    """Change nothing in the folder; the error is in the command."""


def also(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]


def chats(folder: Path) -> None:
    write_rows(folder, [{"prompt": [{"role": "user", "content": f"say {at}"}]} for at in range(40)])


def weight(name: str, value: np.ndarray) -> Spoil:
    """Replace one weight by another."""

    def spoil(folder: Path) -> None:
        file = folder / "model" / "model.safetensors"
        save_file({**load_file(file), name: value}, file, metadata={"format": "pt"})

    return spoil


def no_end(folder: Path) -> None:
    set_json("model/config.json", eos_token_id=None)(folder)
    set_json("model/tokenizer_config.json", eos_token=None)(folder)


def index(*names: str) -> Spoil:
    """Write an index of weights in these files."""
    said = {"metadata": {}, "weight_map": {f"weight.{at}": name for at, name in enumerate(names)}}
    return text("model/model.safetensors.index.json", json.dumps(said))


def eight_tebibytes(folder: Path) -> None:
    """Write weights of 8 TiB into a sparse file."""
    width, vocabulary = 2**20, 257
    set_json("model/config.json", hidden_size=width)(folder)
    shapes = {f"model.layers.{at}.self_attn.q_proj.weight": [width, width] for at in range(2)}
    shapes |= {"model.embed_tokens.weight": [vocabulary, width], "model.norm.weight": [width]}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    with (folder / "model" / "model.safetensors").open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        file.truncate(8 + len(said) + end)


SHARDS = [f"model-0000{at}-of-00005.safetensors" for at in range(1, 6)]
LATIN = b"".join(b'{"prompt": "ab%d"}\n' % at for at in range(10)) + b'{"prompt": "ab\xe9"}\n'
NEW = "policy.model.new={hidden = 30, heads = 4}"
ALONE = "policy.model.path=none"
CASES: Mapping[str, tuple[Spoil, str, str]] = {
    # settings
    "misspelt key": (nothing, "policy.lrr=1", "did you mean 'lr'?"),
    "misspelt section": (nothing, "polcy.lr=1", "did you mean 'policy'?"),
    "lr negative": (nothing, "policy.lr=-1", "policy.lr is -1"),
    "lr a text": (nothing, "policy.lr=abc", 'policy.lr is "abc"'),
    "lr without value": (nothing, "policy.lr", "section.key=value"),
    "unknown algorithm": (nothing, "algorithm.name=grop", "did you mean 'grpo'?"),
    "no prompts": (nothing, "algorithm.prompts_per_step=0", "greater than 0"),
    "one sample": (nothing, "algorithm.samples_per_prompt=1", "at least 2"),
    "too many minibatches": (nothing, "algorithm.minibatches=1000", "4 prompts x 8 samples = 32 rows"),
    "temperature 0": (nothing, "rollout.temperature=0", "none could score higher than another"),
    "temperature negative": (nothing, "rollout.temperature=-1", "at least 0"),
    "top_p above 1": (nothing, "rollout.top_p=1.5", "at most 1"),
    "device gpu": (nothing, "run.device=gpu", 'run.device is "gpu"'),
    "device that is not there": (nothing, "run.device=cuda:63", "there is no device 'cuda:63'"),
    "seed negative": (nothing, "run.seed=-1", "at least 0"),
    "float16": (nothing, "policy.model.dtype=float16", "float32"),
    "pool of 0": (nothing, "placement.pools={main = 0}", "at least one rank"),
    "mesh that does not fit": (
        nothing,
        "placement.train_parallel={main = {tp = 3}}",
        "ranks and the pool has 1",
    ),
    "pool unknown": (nothing, "placement.roles={reward = 'man'}", "did you mean 'main'?"),
    "role unknown": (nothing, "placement.roles={rewrad = 'main'}", "did you mean 'reward'?"),
    "role not cast": (nothing, "placement.roles={critic = 'main'}", "critic"),
    "backend unknown": (nothing, "placement.backend=rya", "did you mean 'ray'?"),
    "heads that do not divide": (nothing, f"{ALONE} {NEW}", "30 / 4 leaves 2"),
    "two models": (nothing, "policy.model.new={}", "both path"),
    "no model": (nothing, ALONE, "neither path nor new"),
    "template variable taken": (
        nothing,
        "task.template_arguments={add_generation_prompt = true}",
        "'add_generation_prompt' is set by the rendering itself",
    ),
    "reward taken away": (nothing, "reward=none", "reward is none"),
    "too many prompts a step": (
        nothing,
        "algorithm.prompts_per_step=1_000_000",
        "draw every prompt 27,777 times",
    ),
    "answers fill the context": (nothing, "rollout.max_tokens=64", "the model's context is 64"),
    "penalty longer than answers": (
        nothing,
        "algorithm.name=dapo algorithm.overlong_buffer=9",
        "overlong_buffer is 9",
    ),
    # recipes
    "key twice": (text("run.toml", "[run]\nseed = 1\nseed = 2\n"), "", "line 3"),
    "table twice": (text("run.toml", "[run]\n[run]\n"), "", "line 2"),
    "empty recipe": (text("run.toml", ""), "", "policy is missing"),
    "bare key": (
        text("run.toml", "lr = 1e-5\n" + TOML),
        "",
        "'lr' is in another section: critic.lr or policy.lr",
    ),
    "recipe of bytes": (text("run.toml", b"\xff\xfe"), "", "is not UTF-8"),
    # models
    "model missing": (nothing, "policy.model.path=./modle", "there is no directory"),
    "no config": (lambda folder: (folder / "model/config.json").unlink(), "", "has no config.json"),
    "config broken": (text("model/config.json", '{"model_type": '), "", "cannot be"),
    "config a list": (text("model/config.json", "[]"), "", "is not a JSON object"),
    "weights corrupt": (text("model/model.safetensors", b"\xff" * 64), "", "model.safetensors"),
    "weights truncated": (cut, "", "model.safetensors"),
    "weights missing": (lambda folder: (folder / "model/model.safetensors").unlink(), "", "has no weights"),
    "a weight missing": (drop_weight, "", "has no weight 'model.layers.1.mlp.up_proj.weight'"),
    "pickled weights": (pickled, "", "loading a pickle can execute anything"),
    "no tokeniser": (lambda folder: (folder / "model/tokenizer.json").unlink(), "", "tokeniser"),
    "no chat template": (
        also(chats, set_json("model/tokenizer_config.json", chat_template=None)),
        "",
        "has no chat template",
    ),
    "weights of whole numbers": (
        weight("model.norm.weight", np.ones(8, np.int32)),
        "",
        "the weight 'model.norm.weight' in",
    ),
    "vocab_size below the weights": (set_json("model/config.json", vocab_size=100), "", "vocab_size is 100"),
    "vocab_size above the weights": (set_json("model/config.json", vocab_size=999), "", "vocab_size is 999"),
    "an embedding of another width": (
        weight("model.embed_tokens.weight", np.ones((257, 9), np.float32)),
        "",
        "hidden_size is 8",
    ),
    "tokeniser above the embedding": (
        also(
            set_json("model/config.json", vocab_size=100),
            weight("model.embed_tokens.weight", np.ones((100, 8), np.float32)),
        ),
        "",
        "the tokeniser has 257 tokens and the model's embedding 100 rows",
    ),
    "an end token above the embedding": (
        set_json("model/config.json", eos_token_id=999),
        "",
        "the end token 999 is beyond the model's embedding of 257 rows",
    ),
    "shards missing": (
        also(lambda folder: (folder / "model/model.safetensors").unlink(), index(*SHARDS)),
        "",
        "lacks model-00001-of-00005.safetensors, model-00002-of-00005.safetensors, "
        "model-00003-of-00005.safetensors and 2 more",
    ),
    "weights of 8 TiB": (eight_tebibytes, "", "weights 8.0 TiB"),
    "a shard missing": (index("model.safetensors", SHARDS[1]), "", f"model lacks {SHARDS[1]}"),
    "empty stop": (nothing, 'rollout.stop=[""]', 'rollout.stop[0] is ""'),
    # rows
    "rows missing": (nothing, "task.source=prompt.jsonl", "prompt.jsonl is not there"),
    "rows empty": (text("prompts.jsonl", ""), "", "prompts.jsonl"),
    "line broken": (data('{"prompt": "a', at=36), "", "line 37"),
    "not UTF-8": (text("prompts.jsonl", LATIN), "", "line 11"),
    "column missing": (data({"prompt": "x"}, at=7), "", "line 8"),
    "no prompt column": (data(*({"promt": "x"} for _ in range(40))), "", "there is no column 'prompt'"),
    "too few rows": (lambda folder: write_rows(folder, rows(3)), "", "task.held_out is 4"),
    "held out too many": (nothing, "task.held_out=40", "hold out fewer than 40"),
    "assistant last": (
        data({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}),
        "",
        "line 1",
    ),
    "role usr": (
        data({"prompt": [{"role": "usr", "content": "x"}], "answer": "1"}),
        "",
        "did you mean 'user'?",
    ),
    "prompt empty": (data({"prompt": "", "answer": "1"}, at=4), "", "line 5"),
    "prompt null": (data({"prompt": None, "answer": "1"}, at=4), "", "line 5"),
    "same id": (lambda folder: write_rows(folder, [{**row, "id": "a"} for row in rows()]), "", "id"),
    "key twice in a line": (data('{"prompt": "a", "prompt": "b", "answer": "1"}'), "", "line 1"),
    "a .json": (also(text("rows.json", "[]")), "task.source=rows.json", ".jsonl"),
    "a .csv": (also(text("rows.csv", "prompt\n")), "task.source=rows.csv", ".jsonl"),
    "a task of the hub": (nothing, "task.source=gsm8k", "a file ends in .jsonl or .parquet"),
    "prompt longer than the context": (
        lambda folder: write_rows(
            folder, [*({"prompt": f"say {at}"} for at in range(40)), {"prompt": "a" * 99}]
        ),
        "",
        "the longest, prompts.jsonl line 41",
    ),
    "no answers to learn": (
        lambda folder: write_rows(folder, [{"prompt": f"say {at}"} for at in range(40)]),
        "warm_start.steps=2",
        "has no answer to learn from",
    ),
    # rewards
    "reward not Python": (text("reward.py", "def brief(:\n"), "", "line 1"),
    "reward misspelt": (nothing, "reward.function=reward.py:breif", "did you mean 'brief'?"),
    "reward's file missing": (nothing, "reward.function=rewards.py:brief", "did you mean 'reward.py'?"),
    "no reward": (nothing, "reward.function=none", "reward.function is missing"),
    "reward cannot be imported": (text("reward.py", "import nothing_here\n" + REWARD), "", "nothing_here"),
    "reward wants a column": (nothing, "reward.function=reward.py:other", "needs a column 'solution'"),
    "reward is no function": (nothing, "reward.function=reward.py:text", "reward.py:text"),
    "reward raises": (text("reward.py", "def brief(**_): raise ValueError('no idea')\n"), "", "no idea"),
    "reward gives one number": (text("reward.py", "def brief(**_): return 1.0\n"), "", "float"),
    "no cost": (nothing, "algorithm.name=safe_rlhf", "cost.function and cost.model are not set"),
    # directories
    "directory taken": (also(text("taken", "mine")), "run.dir=taken", "taken is a file"),
    "directory of another": (
        also(lambda folder: (folder / "mine").mkdir(), text("mine/notes.txt", "mine")),
        "run.dir=mine",
        "is not a run directory",
    ),
    "directory that cannot be": (nothing, "run.dir=/proc/nope", "/proc does not allow new files"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(TOML)
    (tmp_path / "reward.py").write_text(REWARD)
    write_rows(tmp_path, rows())
    write_model(tmp_path)
    return tmp_path


def files(folder: Path) -> set[Path]:
    """Return all files below a folder without Python's caches."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def given(command: str, settings: str) -> list[str]:
    """Return the words of a command; blanks separate its settings."""
    words, open_braces = [command, "run.toml"], 0
    for part in settings.split():
        if open_braces:
            words[-1] += f" {part}"
        else:
            words += ["--set", part]
        open_braces += part.count("{") - part.count("}")
    return words


@pytest.mark.parametrize("case", CASES)
def test_a_bad_input_is_refused_at_once_in_words(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, settings, words = CASES[case]
    spoil(folder)
    before = files(folder)
    began = time.process_time()
    code = main(given("run", settings))
    seconds = time.process_time() - began
    said = capsys.readouterr().err
    assert code == 2, said
    assert words in said
    assert "error: " in said and "Traceback" not in said
    assert seconds < LIMIT_S
    assert files(folder) == before, "nothing is left behind"


def test_the_folder_itself_is_sound(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.toml"]) == 0
    assert capsys.readouterr().out.endswith("ready\n")


@pytest.mark.parametrize(
    ("spoil", "settings", "note"),
    [
        (nothing, "rollout.max_rows=1_000_000_000", ""),
        (nothing, "run.threads=4096", "run.threads is 4096"),
        (nothing, "algorithm.prompts_per_step=100", "prompts repeat within a step"),
        (nothing, "evaluate=none", ""),
        (no_end, "", "the model names no end token"),
        (no_end, "rollout.stop=['x']", ""),
        (
            nothing,
            "algorithm.name=safe_rlhf cost={function = 'reward.py:brief'} algorithm.cost_margin=0.1 "
            "algorithm.cost_limit=0.05",
            "the multiplier targets a mean cost of -0.05",
        ),
        (
            lambda folder: text("prompts.jsonl", b"\xef\xbb\xbf" + (folder / "prompts.jsonl").read_bytes())(
                folder
            ),
            "",
            "",
        ),
        (data("", at=3), "", ""),
        (
            lambda folder: text(
                "prompts.jsonl", (folder / "prompts.jsonl").read_bytes().replace(b"\n", b"\r\n")
            )(folder),
            "",
            "",
        ),
    ],
    ids=[
        "many rows",
        "many threads",
        "prompts repeat",
        "no evaluation",
        "no end token",
        "no end token but a stop",
        "price out of reach",
        "BOM",
        "blank line",
        "CRLF",
    ],
)
def test_what_looks_odd_and_can_be_done_is_ready(
    spoil: Spoil, settings: str, note: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    assert main(given("check", settings)) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert said.endswith("ready\n") and note in said


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("rum.toml", "did you mean 'run.toml'?"),
        ("model", "is a directory"),
        ("prompts.jsonl", "line 1"),
        ("", "is a directory"),
    ],
)
def test_what_is_no_recipe_is_refused(
    recipe: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", recipe]) == 2
    assert words in capsys.readouterr().err
