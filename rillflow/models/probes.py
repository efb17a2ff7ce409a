"""Probes: run an untrusted chat template or tokeniser in a limited child before this process uses it.

    driver ─ JSON ─> python -m rillflow.models.probe_child NAME ─┬─ ended ────> used here
                     limits: processor time, address space       └─ killed ───> ModelError

Both are programs: a template can loop or allocate without end, a tokeniser's patterns may backtrack without
end, and its replacements may multiply a text. The child renders the driver's first chat and a longer version
of it with many turns, or encodes some of the driver's texts and a text of printable characters. It checks
only that the work ends within the limits, not its results or its errors. A file that misbehaves only on a
certain date, message or text is not detected.

Imports neither torch, transformers nor jinja2.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rillflow.errors import ModelError

CPU_S = {"template": 1, "tokenizer": 15}
"""Processor time of each child in seconds; the largest tokenisers load in 2 s."""
TOO_MUCH = 3
"""Exit code of a child whose work needs more memory or produces more output than allowed."""
TEXTS, CHARACTERS = 64, 4_000
"""Number of trial texts for a tokeniser, and maximum characters per text."""
_WAIT_S = 60.0


def chosen_template(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the template of a transformers tokeniser for messages with these tools.

    Raises:
        ModelError: it has several, and none for such messages.
    """
    try:
        template: str = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise ModelError(
            "no chat template of the model is named default",
            why=f"it has the templates {', '.join(sorted(tokenizer.chat_template or ()))}",
            fix="save the one to use as chat_template.jinja in the model's directory, and remove the others",
        ) from error
    return template


def probe_template(template: str, variables: Mapping[str, Any], chat: Sequence[Mapping[str, Any]]) -> None:
    """Check that a chat template ends within the limits.

    Args:
        template: its text.
        variables: its variables besides the messages.
        chat: the first messages to be rendered.

    Raises:
        ModelError: it does not.
    """
    broken = _run("template", {"template": template, "variables": variables, "chat": list(chat)})
    if broken:
        raise ModelError(
            f"the chat template exceeds {broken} for one conversation: {template[:60]!r}",
            why="a template that loops or allocates without end would hang the run",
            fix="choose another model, or correct chat_template in its directory",
        )


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
    broken = _run("tokenizer", {"file": str(file), "texts": [string.printable, *tried]})
    if broken:
        raise ModelError(
            f"{file} exceeds {broken} for {len(tried) + 1} texts",
            why="a pattern or replacement that grows without end would hang the run",
            fix="choose another model, or correct normalizer and pre_tokenizer in the file",
        )


def _run(name: str, asked: Mapping[str, Any]) -> str:
    """Run a probe's child; return the name of the limit that it exceeded, or an empty text."""
    slow = f"{CPU_S[name]} s of processor time"
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "rillflow.models.probe_child", name],
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=_WAIT_S,
            check=False,
            env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
    except subprocess.TimeoutExpired:
        return slow
    if ended.returncode == TOO_MUCH or b"memory allocation" in ended.stderr:
        return "the limit of memory or text length"
    return slow if ended.returncode < 0 else ""
