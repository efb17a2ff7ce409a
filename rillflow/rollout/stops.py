"""Stops: texts that end a row before its limit.

a text that is one token of the model ─ the engine compares tokens
any other text ─ the last tokens are decoded when a new one may complete it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rillflow.models.tokenizer import Tokenizer


class Stops:
    """Texts that end a row; the text and any rest of its last token stay in the row.

    Args:
        texts: texts that end a row, in addition to the model's own stop tokens.
        tokenizer: the model's tokenizer.

    Raises:
        ModelError: a text is empty.

    Example:
        Stops(("Observation:", "</s>"), tokenizer).ends([17, 4, 99])
    """

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer) -> None:
        one = {text: tokenizer.token_of(text) for text in texts}
        self.tokens = tokenizer.stop_tokens | {token for token in one.values() if token is not None}
        """Tokens that end a row by themselves."""
        self.longest = max((len(text.encode()) for text, token in one.items() if token is None), default=0)
        """Maximum tokens of a stop text that is not a single token; 0 if there is none."""
        self._texts = tuple(text for text, token in one.items() if token is None)
        self._tokenizer = tokenizer

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of these tokens, a row's last ``longest`` at most, completes a text."""
        piece = self._tokenizer.pieces(tokens[-1:])[0]
        may_complete = [text for text in self._texts if text[-1] in piece or not piece.isascii()]
        return bool(may_complete) and any(text in self._tokenizer.decode(tokens) for text in may_complete)
