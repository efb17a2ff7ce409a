"""One tokeniser in several threads: text never becomes a special token because another thread reads some."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

from rillflow.models.bare import character_tokenizer
from rillflow.models.tokenizer import Tokenizer
from tests.clients.small_model import make_tokenizer

RENDERED = "<|im_start|>user\n17+25<|im_end|>\n" * 20


def test_threads_that_read_special_tokens_and_text_do_not_meet() -> None:
    tokenizer = Tokenizer(make_tokenizer())
    text, chat = tokenizer.encode(RENDERED), tokenizer.encode_more(RENDERED, is_rendered=True)
    assert len(text) > len(chat) and tokenizer.stop_tokens.isdisjoint(text)

    def again(is_rendered: bool) -> bool:
        read = [tokenizer.encode_more(RENDERED, is_rendered=is_rendered) for _ in range(60)]
        return all(each == (chat if is_rendered else text) for each in read)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(again, [True, False] * 4))


def test_a_tokeniser_goes_to_another_process() -> None:
    tokenizer = Tokenizer(character_tokenizer("0123456789+=", 16))
    assert pickle.loads(pickle.dumps(tokenizer)).encode("1+2=") == tokenizer.encode("1+2=")  # noqa: S301
