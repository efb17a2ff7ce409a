"""Hostile model folders next to a recipe, and the answers of ``check --no-code``.

Every entry damages a sound folder (``tests.unit.cli.test_bad_inputs``) and has words of the refusal. Large
sizes are only claimed, or files are sparse, so a folder takes kilobytes of disk.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.cli.test_bad_inputs import Spoil, also, chats, index, set_json, text

WEIGHTS, CONFIG, TOKENS = "model/model.safetensors", "model/config.json", "model/tokenizer.json"
SETTINGS, INDEX = "model/tokenizer_config.json", "model/model.safetensors.index.json"
GIB = 2**30
DEEP = "[" * 10**5 + "]" * 10**5


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """One folder."""

    spoil: Spoil
    """Function that makes the folder hostile."""
    words: str
    """Words of the refusal."""


def gone(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def sparse(name: str, size: int) -> Spoil:
    def spoil(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return spoil


def link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def loop(name: str) -> Spoil:
    """Make two links that point to each other."""
    return also(link(name, Path(name).name + ".b"), link(f"{name}.b", Path(name).name))


def special(name: str, make: Callable[[Path], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def header(said: Any, size: int | None = None, length: int | None = None) -> Spoil:
    """Make a weight file with this header and ``size`` bytes of sparse data."""

    def spoil(folder: Path) -> None:
        told = said if isinstance(said, bytes) else json.dumps(said).encode()
        with (folder / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", len(told) if length is None else length) + told)
            file.truncate(8 + len(told) + (size or 0))

    return spoil


def late(make: Callable[[], Spoil]) -> Spoil:
    """Build a large value only when its case runs, because every pytest worker imports this file."""
    return lambda folder: make()(folder)


def entry(dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"model.embed_tokens.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def many(count: int) -> dict[str, Any]:
    """Return names without data."""
    return {f"w{at}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for at in range(count)}


def tokenizer(**changes: Any) -> Spoil:
    return set_json(TOKENS, **changes)


def template(said: str) -> Spoil:
    return also(chats, set_json(SETTINGS, chat_template=said))


def normalizer(*parts: tuple[dict[str, str], str]) -> Spoil:
    """Make a tokenizer that replaces patterns before it splits a text."""
    made = [{"type": "Replace", "pattern": pattern, "content": content} for pattern, content in parts]
    return tokenizer(normalizer={"type": "Sequence", "normalizers": made})


def split(pattern: str) -> Spoil:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [cut]})


def adapter(**said: Any) -> Spoil:
    """Make the folder an adapter's."""
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "."}
    return text("model/adapter_config.json", json.dumps({**plain, **said}))


def refused(spoil: Spoil, words: str) -> Hostile:
    return Hostile(spoil=spoil, words=words)


NONSENSE = b"\x93NUMPY\x01\x00v\x00{'descr'"
PICKLE = b"\x80\x04cos\nsystem\n(S'touch owned'\ntR."
SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
REPLACE = ({"String": "a"}, "a" * 100)

FOLDERS: dict[str, Hostile] = {
    # headers of weight files
    "header of 2^63 bytes": refused(header({}, length=2**63), "model.safetensors claims"),
    "header of 2^64 - 1 bytes": refused(header({}, length=2**64 - 1), "model.safetensors claims"),
    "header of 1 TiB in a sparse file": refused(header({}, 2**40, 2**40), "model.safetensors claims"),
    "header of 64 MiB": refused(header(b" " * 2**20, 2**27, 2**26), "model.safetensors claims"),
    "header longer than the file": refused(header({}, length=100), "model.safetensors claims"),
    "header empty": refused(header(b""), "model.safetensors"),
    "header no JSON": refused(header(b"{" * 99), "model.safetensors"),
    "header a list": refused(header([1, 2]), "model.safetensors"),
    "header null": refused(header(b"null"), "model.safetensors"),
    "header nested": refused(header(DEEP.encode()), "model.safetensors"),
    "header a nested object": refused(header(b'{"a":' * 10**4 + b"1" + b"}" * 10**4), "model.safetensors"),
    "header not UTF-8": refused(header(b"\xff\xfe" * 9), "model.safetensors"),
    "header with a NUL": refused(header(b"\0" * 64), "model.safetensors"),
    "header with a key twice": refused(
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2 + b'"b":1}', 4),
        "model.safetensors",
    ),
    "300,000 names": refused(late(lambda: header(many(300_000))), "has no weight 'embed_tokens.weight'"),
    "a name of a megabyte": refused(
        header({"x" * 2**20: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4), "has no weight"
    ),
    "a layer of 10^30": refused(
        header(
            {f"model.layers.{10**30}.x.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4
        ),
        "has no weight",
    ),
    # descriptions of weights in headers
    "offsets that overlap": refused(
        header(
            {
                "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
            },
            24,
        ),
        "model.safetensors",
    ),
    "offsets with a hole": refused(
        header(
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
            },
            12,
        ),
        "model.safetensors",
    ),
    "offsets backwards": refused(header(entry(offsets=(16, 0)), 16), "model.safetensors"),
    "offsets negative": refused(header(entry(offsets=(-16, 0)), 16), "model.safetensors"),
    "offsets beyond the file": refused(header(entry(offsets=(0, 2**40)), 16), "model.safetensors"),
    "offsets of 2^64": refused(header(entry(offsets=(2**64 - 16, 2**64)), 16), "model.safetensors"),
    "offsets a text": refused(header(entry(offsets="all"), 16), "model.safetensors"),
    "shape that overflows": refused(header(entry(shape=[2**40, 2**40]), 16), "model.safetensors"),
    "shape negative": refused(header(entry(shape=[-2, -2]), 16), "model.safetensors"),
    "shape of a million dims": refused(
        header(entry(shape=[1] * 10**6, offsets=(0, 4)), 4), "has 1,000,000 dims"
    ),
    "shape other than its bytes": refused(header(entry(shape=[3, 3]), 16), "model.safetensors"),
    "dtype unknown": refused(header(entry(dtype="F33"), 16), "model.safetensors"),
    "dtype a list": refused(header({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}, 4), "model"),
    "weights of whole numbers": refused(header(entry("I32"), 16), "has the type I32"),
    "weights of booleans": refused(header(entry("BOOL", (4, 4)), 16), "has the type BOOL"),
    "weights of 8 bits": refused(header(entry("F8_E4M3", (4, 4)), 16), "has the type F8_E4M3"),
    "an embedding of one dim": refused(header(entry(shape=(4,)), 16), "has the shape [4]"),
    "metadata of a megabyte": refused(header({"__metadata__": {"a": "x" * 2**20}}), "has no weight"),
    "metadata no text": refused(header({"__metadata__": {"a": 1}}), "model.safetensors"),
    # weight files of other formats
    "a pickle called safetensors": refused(text(WEIGHTS, PICKLE), "model.safetensors"),
    "a pickle alone": refused(also(gone(WEIGHTS), text("model/pytorch_model.bin", PICKLE)), "a pickle"),
    "a .pt alone": refused(also(gone(WEIGHTS), text("model/model.pt", PICKLE)), "model.pt, a pickle"),
    "a .npy called safetensors": refused(text(WEIGHTS, NONSENSE), "model.safetensors"),
    "an empty file": refused(text(WEIGHTS, b""), "model.safetensors"),
    "four bytes": refused(text(WEIGHTS, b"\x08\0\0\0"), "model.safetensors"),
    "1 TiB of zeros": refused(sparse(WEIGHTS, 2**40), "model.safetensors"),
    # special files
    "weights a folder": refused(special(WEIGHTS, Path.mkdir), "model.safetensors is not a regular file"),
    "weights a FIFO": refused(special(WEIGHTS, os.mkfifo), "model.safetensors is not a regular file"),
    "weights a socket": refused(special(WEIGHTS, unix_socket), "model.safetensors is not a regular file"),
    "weights /dev/zero": refused(link(WEIGHTS, "/dev/zero"), "model.safetensors is not a regular file"),
    "weights a loop": refused(loop(WEIGHTS), "model.safetensors"),
    "weights a link to nothing": refused(link(WEIGHTS, "nowhere"), "model.safetensors"),
    "weights /proc/self/mem": refused(link(WEIGHTS, "/proc/self/mem"), "model.safetensors"),
    "config a folder": refused(special(CONFIG, Path.mkdir), "config.json"),
    "config a FIFO": refused(special(CONFIG, os.mkfifo), "config.json"),
    "config /dev/zero": refused(link(CONFIG, "/dev/zero"), "config.json"),
    "config a loop": refused(loop(CONFIG), "config.json"),
    "config another folder's": refused(link(CONFIG, "/etc/passwd"), "config.json"),
    "tokeniser a FIFO": refused(special(TOKENS, os.mkfifo), "tokenizer.json is not a regular file"),
    "tokeniser a loop": refused(loop(TOKENS), "tokenizer.json"),
    "tokeniser /dev/zero": refused(link(TOKENS, "/dev/zero"), "tokenizer.json is not a regular file"),
    "tokeniser's settings a FIFO": refused(
        special(SETTINGS, os.mkfifo), "tokenizer_config.json is not a regular file"
    ),
    "generation config a FIFO": refused(
        special("model/generation_config.json", os.mkfifo), "generation_config.json is not a regular file"
    ),
    "template a FIFO": refused(special("model/chat_template.jinja", os.mkfifo), "chat_template.jinja"),
    "added tokens a FIFO": refused(special("model/added_tokens.json", os.mkfifo), "added_tokens.json"),
    "index a FIFO": refused(special(INDEX, os.mkfifo), "model.safetensors.index.json is not a regular file"),
    # file sizes
    "config of 1 TiB": refused(sparse(CONFIG, 2**40), "config.json has"),
    "tokeniser of 1 GiB": refused(sparse(TOKENS, GIB), "tokenizer.json has"),
    "tokeniser's settings of 1 GiB": refused(sparse(SETTINGS, GIB), "tokenizer_config.json has"),
    "index of 1 GiB": refused(sparse(INDEX, GIB), "model.safetensors.index.json has"),
    "template of 1 GiB": refused(sparse("model/chat_template.jinja", GIB), "chat_template.jinja has"),
    "merges of 1 GiB": refused(sparse("model/merges.txt", GIB), "merges.txt has"),
    # settings
    "config nested": refused(text(CONFIG, DEEP), "config.json"),
    "config nested objects": refused(text(CONFIG, '{"a":' * 10**5), "config.json"),
    "config NUL": refused(text(CONFIG, b"\0" * 100), "config.json"),
    "config a number of 10^6 digits": refused(text(CONFIG, "9" * 10**6), "config.json"),
    "config a text": refused(text(CONFIG, '"llama"'), "config.json"),
    "10^8 layers": refused(set_json(CONFIG, num_hidden_layers=10**8), "num_hidden_layers is 100000000"),
    "10^4000 layers": refused(set_json(CONFIG, num_hidden_layers=10**4000), "num_hidden_layers is a number"),
    "layers a text": refused(set_json(CONFIG, num_hidden_layers="2"), "num_hidden_layers is '2'"),
    "-1 heads": refused(set_json(CONFIG, num_attention_heads=-1), "num_attention_heads is -1"),
    "NaN wide": refused(set_json(CONFIG, hidden_size=float("nan")), "hidden_size is nan"),
    "vocabulary of 10^12": refused(set_json(CONFIG, vocab_size=10**12), "vocab_size is"),
    "vocabulary unlike the weights": refused(set_json(CONFIG, vocab_size=100_000), "vocab_size is 100000"),
    "hidden size unlike the weights": refused(set_json(CONFIG, hidden_size=16), "hidden_size is 16"),
    "sizes inside text_config": refused(
        set_json(CONFIG, text_config={"num_hidden_layers": 10**9}), "num_hidden_layers is"
    ),
    "end token a text": refused(set_json(CONFIG, eos_token_id="</s>"), "eos_token_id is </s>"),
    "end token beyond the vocabulary": refused(
        set_json(CONFIG, eos_token_id=10**9), "the end token 1000000000"
    ),
    # indexes
    "index with ..": refused(index("../model/model.safetensors"), "'../model/model.safetensors'"),
    "index absolute": refused(index("/etc/passwd"), "'/etc/passwd'"),
    "index to a pickle": refused(index("pytorch_model.bin"), "'pytorch_model.bin'"),
    "index with a NUL": refused(index("a\0.safetensors"), "model.safetensors.index.json"),
    "index with a URL": refused(index("https://x/model.safetensors"), "'https://x/model.safetensors'"),
    "index of numbers": refused(
        text(INDEX, '{"metadata": {}, "weight_map": {"a": 1}}'), "model.safetensors.index.json names 1"
    ),
    "index nested": refused(text(INDEX, DEEP), "weight index"),
    "index of 10^5 shards": refused(
        late(lambda: index(*(f"{at}.safetensors" for at in range(10**5)))), "lacks"
    ),
    # tokenizers
    "tokeniser nested": refused(text(TOKENS, DEEP), "tokeniser"),
    "tokeniser half": refused(text(TOKENS, '{"version": "1.0", "model": {'), "tokeniser"),
    "tokeniser a list": refused(text(TOKENS, "[]"), "tokeniser"),
    "tokeniser without vocabulary": refused(
        tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}), "tokeniser"
    ),
    "tokeniser of an unknown kind": refused(tokenizer(model={"type": "Pickle", "vocab": {}}), "tokeniser"),
    "merges of tokens it lacks": refused(
        tokenizer(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}), "tokeniser"
    ),
    "a token of 2^32 - 1": refused(
        tokenizer(model={"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}), "tokens"
    ),
    "a token of 2^70": refused(
        tokenizer(model={"type": "WordLevel", "vocab": {"a": 2**70}, "unk_token": "a"}), "tokeniser"
    ),
    "a replacement of 10^12 characters": refused(normalizer(*[REPLACE] * 6), "tokenizer.json exceeds"),
    "a replacement of 10^6 characters": refused(normalizer(*[REPLACE] * 3), "tokenizer.json exceeds"),
    # templates
    "a template that loops": refused(template(SPIN), "the chat template exceeds"),
    "a template of 10^10 characters": refused(template("{{ 'a' * 10**10 }}"), "the chat template exceeds"),
    "a template of 10^9 digits": refused(template("{{ 10 ** (10 ** 9) }}"), "the chat template exceeds"),
    "a template that calls itself": refused(
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "the chat template refuses"
    ),
    "a template that reaches for os": refused(
        template("{{ cycler.__init__.__globals__.os.system('touch owned') }}"), "the chat template refuses"
    ),
    "a template that includes a file": refused(
        template("{% include '/etc/passwd' %}"), "the chat template refuses"
    ),
    "a template half": refused(template("{% if"), "the chat template"),
    "a template of a number": refused(also(chats, set_json(SETTINGS, chat_template=7)), "the chat template"),
    # adapters
    "an adapter beside itself": refused(adapter(), "names itself as its base"),
    "an adapter beside /etc": refused(adapter(base_model_name_or_path="/etc"), "config.json"),
    "an adapter without base": refused(adapter(base_model_name_or_path=""), "adapter_config.json has"),
    "an adapter of another kind": refused(adapter(peft_type="PICKLE"), "adapter_config.json has"),
    "an adapter nested": refused(text("model/adapter_config.json", DEEP), "adapter_config.json"),
    "an adapter a FIFO": refused(special("model/adapter_config.json", os.mkfifo), "adapter_config.json"),
    "an adapter of rank 10^9": refused(adapter(r=10**9), "adapter_config.json has r = 1000000000"),
    # code
    "code of its own": refused(
        also(
            set_json(CONFIG, model_type="owned", auto_map={"AutoConfig": "owned.Config"}),
            text("model/owned.py", "open('owned', 'w')\n"),
        ),
        "owned",
    ),
    "quantised": refused(set_json(CONFIG, quantization_config={"quant_method": "gptq"}), "quantised"),
    "an encoder-decoder": refused(set_json(CONFIG, model_type="t5", is_encoder_decoder=True), "model"),
}
BOUNDED: dict[str, Spoil] = {
    "a pattern of many tries": split("(x+x+)+y"),
    "a pattern over every character": split("(s|sa|a|ay|y|.)*#"),
    "a replaced pattern of many tries": normalizer(({"Regex": "(.|s|a|y)*#"}, "b")),
    "a tokeniser's class of another module": set_json(SETTINGS, tokenizer_class="os.system"),
    "a tokeniser's code": also(
        set_json(SETTINGS, auto_map={"AutoTokenizer": ["owned.Tokenizer", None]}),
        text("model/owned.py", "open('owned', 'w')\n"),
    ),
    "modules called as libraries": also(
        text("model/tokenizers.py", "open('owned', 'w')\n"), text("model/jinja2.py", "open('owned', 'w')\n")
    ),
    "a pickle beside the weights": text("model/pytorch_model.bin", PICKLE),
}
"""Contents that a sound folder may have: the check ends within bounds, and nothing runs."""
EVERY_DAY = (
    "header of 1 TiB in a sparse file",
    "offsets that overlap",
    "weights /dev/zero",
    "config a FIFO",
    "10^8 layers",
    "index with ..",
    "a template that loops",
    "a replacement of 10^12 characters",
    "an adapter beside itself",
    "quantised",
)
"""The fastest case of every kind."""
