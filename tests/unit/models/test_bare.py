"""A bare tokenizer gives transformers' tokens, bit for bit, or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from rillflow.errors import ModelError
from rillflow.models.bare import END, BareTokenizer, bare_tokenizer, character_tokenizer
from rillflow.models.load_tokenizer import load_tokenizer
from rillflow.models.tokenizer import Chat, Tokenizer

TEXTS = ["the cat", " sat  on\nthe mat", "", "日本 é 🙂", "</s>", "a<|user|>b</s>", "<s><s>twice", "x" * 300]
Make = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(params=["plain", "begin", "begin and end", "chat", "normalised"])
def folder(request: pytest.FixtureRequest, byte_pair: Make, tmp_path: Path) -> Path:
    """Return a directory as transformers writes it."""
    kind = request.param
    made = byte_pair(begin="begin" in kind, end="end" in kind, chat=kind == "chat")
    if kind == "normalised":
        made.backend_tokenizer.normalizer = normalizers.NFKC()
        made.backend_tokenizer.add_tokens([AddedToken("the cat", lstrip=True, normalized=True)])
    made.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("is_rendered", [False, True])
def test_the_tokens_are_those_of_transformers(folder: Path, is_rendered: bool) -> None:
    inner = bare_tokenizer(folder)
    assert inner is not None
    bare, whole = Tokenizer(inner), Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
    expected = whole.encode_texts(TEXTS, is_rendered=is_rendered)
    assert bare.encode_texts(TEXTS, is_rendered=is_rendered) == expected
    answers = whole.encode_completions(TEXTS, is_rendered=is_rendered)
    assert bare.encode_completions(TEXTS, is_rendered=is_rendered) == answers
    for row in answers:
        assert bare.decode(row) == whole.decode(row)
        assert bare.pieces(row) == whole.pieces(row)
    assert bare.token_of("</s>") == whole.token_of("</s>") == 1
    assert [bare.special_in(text) for text in TEXTS] == [whole.special_in(text) for text in TEXTS]
    assert bare.stop_tokens == whole.stop_tokens and bare.vocabulary_size == whole.vocabulary_size
    assert bare.reads_as(whole) and whole.reads_as(bare)


def test_a_template_is_rendered_by_transformers(byte_pair: Make, tmp_path: Path) -> None:
    byte_pair(chat=True).save_pretrained(tmp_path)
    chats = [Chat(turns=[{"role": "user", "content": "the cat"}])]
    bare = Tokenizer(load_tokenizer(str(tmp_path), as_written=True, whole=False))
    expected = Tokenizer(PreTrainedTokenizerFast.from_pretrained(tmp_path))
    assert bare.encode_chats(chats) == expected.encode_chats(chats)
    assert bare.encode_replies(chats, ["sat"]) == expected.encode_replies(chats, ["sat"])


@pytest.mark.parametrize("alphabet", ["0123456789+-=", "abc é日本\n|<>end"])
def test_a_new_tokeniser_is_what_transformers_makes_of_it(alphabet: str, tmp_path: Path) -> None:
    """Also its files equal those of a tokenizer made by transformers only."""
    made = character_tokenizer(alphabet, 32)
    fresh = Backend.from_str(character_tokenizer(alphabet, 32).backend_tokenizer.to_str())
    whole = PreTrainedTokenizerFast(tokenizer_object=fresh, eos_token=END, pad_token=END, model_max_length=32)
    texts = [alphabet, alphabet[::-1] * 3, ""]
    bare = Tokenizer(made)
    assert bare.encode_completions(texts) == Tokenizer(whole).encode_completions(texts)
    assert (
        bare.encode_texts([END], is_rendered=True)
        == [[0]]
        == Tokenizer(whole).encode_texts([END], is_rendered=True)
    )
    bare.save(tmp_path / "bare")
    whole.save_pretrained(tmp_path / "whole")
    for file in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "bare" / file.name).read_bytes() == file.read_bytes()
    read = load_tokenizer(str(tmp_path / "bare"), as_written=True, whole=False)
    assert isinstance(read, BareTokenizer) and Tokenizer(read).encode_completions(
        texts
    ) == bare.encode_completions(texts)


def change(file: Path, **settings: Any) -> None:
    given = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(
        json.dumps({name: value for name, value in (given | settings).items() if value is not None})
    )


ADDITIONS: dict[str, Callable[[Path], object]] = {
    "a token that tokenizer.json lacks": lambda at: change(at / "tokenizer_config.json", bos_token="<new>"),
    "a further special one": lambda at: change(
        at / "tokenizer_config.json", extra_special_tokens=["<|tool|>"]
    ),
    "special ones by name": lambda at: change(
        at / "tokenizer_config.json", extra_special_tokens={"image_token": "<|image|>"}
    ),
    "another kind of one": lambda at: change(
        at / "tokenizer_config.json",
        added_tokens_decoder={"1": {"content": "</s>", "special": True, "lstrip": True}},
    ),
    "an old list of them": lambda at: (
        change(at / "tokenizer_config.json", added_tokens_decoder=None),
        change(at / "added_tokens.json", **{"<old>": 300}),
    ),
    "truncation": lambda at: change(
        at / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    ),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_a_directory_that_adds_to_its_tokenizer_file_is_left_to_transformers(
    name: str, byte_pair: Make, tmp_path: Path
) -> None:
    byte_pair().save_pretrained(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path), as_written=True, whole=False), BareTokenizer)
    ADDITIONS[name](tmp_path)
    assert bare_tokenizer(tmp_path) is None
    assert isinstance(load_tokenizer(str(tmp_path), as_written=True, whole=False), PreTrainedTokenizerFast)


def test_a_large_vocabulary_is_left_to_transformers_where_it_may_be_of_mistral(tmp_path: Path) -> None:
    vocabulary = {f"t{number}": number for number in range(100_001)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="t0"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    for kind, is_bare in (("qwen2", True), ("mistral", False), ("ministral3", False), (None, False)):
        (tmp_path / "config.json").write_text("{}")
        change(tmp_path / "config.json", model_type=kind)
        assert (bare_tokenizer(tmp_path) is not None) == is_bare


def test_a_tokenizer_file_of_another_shape_is_refused(byte_pair: Make, tmp_path: Path) -> None:
    byte_pair().save_pretrained(tmp_path)
    change(tmp_path / "tokenizer.json", model={"type": "Abacus"})
    with pytest.raises(ModelError, match="no tokeniser that can be loaded"):
        load_tokenizer(str(tmp_path), as_written=True, whole=False)


def test_tokens_of_a_new_model_are_there_before_transformers() -> None:
    code = (
        "import sys; from rillflow.models.bare import character_tokenizer as made;"
        "from rillflow.models.tokenizer import Tokenizer;"
        "print(Tokenizer(made('0123', 8)).encode('310'), 'transformers' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[4, 2, 1] False\n"
