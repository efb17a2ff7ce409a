"""Tokeniser probe: load an untrusted tokenizer.json in a limited child before this process loads it.

    driver ─ file, texts ─> child: 15 s of processor time, 2 GiB ─┬─ ended ────> loaded and encoded here
                                                                  └─ killed ───> ModelError

A tokeniser is a program too: patterns may backtrack without end, replacements may multiply a text. The child
encodes some of the driver's texts, and a text of printable characters. It does not check that the file is a
valid tokeniser; the driver's own loading does. A pattern that misbehaves only on a certain text is not
detected.

``python -m rillflow.models.tokenizer_probe`` is the child. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Sequence
from pathlib import Path

from rillflow.errors import ModelError
from rillflow.models.limited_child import TOO_MUCH, limit, run_limited

CPU_S = 15
"""Processor time of the child in seconds; the largest tokenisers load in 2 s."""
ADDRESS_BYTES = 2 * 2**30
"""Address space of the child in bytes."""
GROWTH, LEAST_TOKENS = 16, 2**12
"""Limit of a text's tokens: this many per byte, or at least this many."""
TEXTS, CHARACTERS = 64, 4_000
"""Number of texts tried, and maximum characters of each."""


def probe_tokenizer(directory: Path, texts: Sequence[str]) -> None:
    """Check that a directory's tokeniser loads and encodes within the limits; skip it without tokenizer.json.

    Args:
        directory: the model's directory.
        texts: the texts to encode later; about TEXTS of them are tried, evenly from the first to the last.

    Raises:
        ModelError: the tokeniser does not.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    tried = [text[:CHARACTERS] for text in texts[:: max(1, len(texts) // TEXTS)][:TEXTS]]
    broken = run_limited(
        "rillflow.models.tokenizer_probe", {"file": str(file), "texts": [string.printable, *tried]}, CPU_S
    )
    if broken:
        raise ModelError(
            f"{file} exceeds {broken} for {len(tried) + 1} texts",
            why="a pattern or replacement that grows without end would hang the run",
            fix="choose another model, or correct normalizer and pre_tokenizer in the file",
        )


def main() -> None:
    """Encode the texts from standard input, within limits."""
    asked = json.loads(sys.stdin.buffer.read())
    limit(CPU_S, ADDRESS_BYTES)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(asked["file"])
        for text in asked["texts"]:
            most = max(LEAST_TOKENS, GROWTH * len(text.encode()))
            if len(tokenizer.encode(text, add_special_tokens=False).ids) > most:
                sys.exit(TOO_MUCH)
    except MemoryError:
        sys.exit(TOO_MUCH)
    except Exception:  # noqa: BLE001  the library has no exception type of its own
        return


if __name__ == "__main__":
    main()
