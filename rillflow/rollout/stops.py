"""Stops: what ends a row besides its limit, as texts.

one token     ─ the engine looks for it
several, or none of the model's own ─ the row's last tokens are decoded where a new one may complete it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rillflow.models.tokenizer import Tokenizer


class Stops:
    """Texts that end a row; the text, and what its last token has beyond it, stay in the row.

    Args:
        texts: what ends a row, besides the model's own stop tokens.
        tokenizer: of the model.

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
        """The most tokens that one of the other texts may be; 0 where there is none."""
        self._texts = tuple(text for text, token in one.items() if token is None)
        self._tokenizer = tokenizer

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether a text is complete with the last of these tokens, the row's last ``longest`` or fewer."""
        piece = self._tokenizer.pieces(tokens[-1:])[0]
        may_complete = [text for text in self._texts if text[-1] in piece or not piece.isascii()]
        return bool(may_complete) and any(text in self._tokenizer.decode(tokens) for text in may_complete)
