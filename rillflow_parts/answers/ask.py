"""Ask: prompt the model that a run has trained so far.

run directory ─ checkpoint ─> model ─> engine ─┐
prompt ─ tokens, made as in training ──────────┴─ generate ─> answer
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from rillflow.app.model_files import require_template
from rillflow.app.plugins import KIND, other_kind
from rillflow.app.trained import model_directory
from rillflow.config.load import validate
from rillflow.errors import DataError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import choose_device, load_model
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import completions
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import native_engine
from rillflow.runs import layout
from rillflow.runs.json_lines import JSON
from rillflow.runs.reader import read_config, rollout_columns
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.example import Example, Message, prompt_of

ASKED_EPOCH = -2
"""Epoch in the row ids of asked prompts; it separates their random numbers from those of other rows."""


Question: TypeAlias = str | tuple[Message, ...]
"""A text, or a conversation that is sent unchanged."""
_READ = ("max_tokens", "stop")
"""Keys of the run's section `rollout` that a question uses; plugins have sections in it."""
_INSTRUCTIONS = ("system", "developer")


class Respondent:
    """The model of a run, ready to answer.

    Args:
        run: the run directory.
        step: step of the checkpoint; None for the newest one.
        temperature: 0 for greedy decoding.
        max_tokens: longest answer in tokens; None for the training setting.
        seed: seed of the sampling; None for a new one every time.
        system: system message before a text; the text then becomes a user message.
        chat: whether conversations will be asked, which need a chat template.

    Raises:
        RunDirectoryError: the path is not a run directory, has no such checkpoint, or trains no policy.
        ConfigError: a value is out of range.
        ModelError: conversations are to be asked, and the model has no chat template.
    """

    def __init__(
        self,
        run: Path,
        *,
        step: int | None = None,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        seed: int | None = None,
        system: str | None = None,
        chat: bool = False,
    ) -> None:
        config = cast(dict[str, Any], read_config(run))
        if KIND in config:
            raise other_kind(run, config[KIND])
        settings = {key: value for key, value in config["rollout"].items() if key in _READ}
        trained = validate(RolloutConfig, settings, str(run / layout.CONFIG))
        limit = trained.max_tokens if max_tokens is None else max_tokens
        asked = {"temperature": temperature, "max_tokens": limit, "stop": trained.stop, "max_rows": 1}
        rollout = validate(RolloutConfig, asked, "the sampling settings")
        self._trained, self._system = _first_prompts(run), system
        folder = model_directory(run, "policy", step).absolute()
        if chat or self._is_chat:
            require_template(folder)
        self._model = load_model(
            ModelConfig(path=str(folder), dtype=config["policy"]["model"]["dtype"]),
            seed=0,
            device=choose_device("auto"),
            base=Path(),
        )
        self._engine = native_engine(self._model, rollout, seed)
        task = validate(TaskConfig, config["task"], str(run / layout.CONFIG))
        self._encoder = Encoder.of(self._model.tokenizer, task.model_copy(update={"clock": None}))
        self._asked = 0

    def answer(self, question: Question) -> str:
        """Return the model's answer to a question; each question has its own random numbers.

        Raises:
            DataError: the model has no chat template, or its tokeniser lacks a character.
            RolloutError: the question leaves no room in the context.
        """
        example = Example(index=self._asked, prompt=self._prompt(question), place="the question")
        tokens = self._encoder.rows([example])[0].prompt.tolist()
        prompts = Batch(
            ids=row_ids([RowId(ASKED_EPOCH, self._asked, 0)]),
            fields={"tokens": Ragged.from_rows([tokens], torch.int64), "columns": Ragged.from_text(["{}"])},
        )
        self._asked += 1
        rollouts = self._engine.generate(prompts)
        return self._model.tokenizer.decode(completions(rollouts).lists()[0])

    def lack(self, question: Question) -> str:
        """Return a note if the recorded prompts all have a system message and the question has none."""
        given, known = _instruction(self._prompt(question)), list(map(_instruction, self._trained))
        if given is not None or not known or None in known:
            return ""
        every = f", {json.dumps(known[0], ensure_ascii=False)}" if known.count(known[0]) == len(known) else ""
        return f"the training prompts have a system message{every}; this prompt has none: add --system TEXT"

    @property
    def _is_chat(self) -> bool:
        """Whether a text is sent as a user message."""
        return self._system is not None or any(isinstance(prompt, list) for prompt in self._trained[:1])

    def _prompt(self, question: Question) -> Question:
        """Return the question in the format of the run's own prompts."""
        if not (isinstance(question, str) and self._is_chat):
            return question
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return (*system, {"role": "user", "content": question})


def read_messages(path: Path) -> tuple[Message, ...]:
    """Read a conversation from a file: a JSON list of messages, or one per line; ``-`` is standard input.

    Raises:
        DataError: the file cannot be read, or is not a conversation that an assistant can answer.
    """
    try:
        text = sys.stdin.read() if path == Path("-") else path.read_text("utf-8-sig")
        found = list(_values(text))
        messages = found[0] if len(found) == 1 and isinstance(found[0], list) else found
        return cast(tuple[Message, ...], prompt_of({"prompt": messages}))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot read messages from {path}: {error}",
            why="messages are a JSON list of objects with 'role' and 'content', or one such object per line",
        ) from error
    except DataError as error:
        raise DataError(f"{path}: {error.what}", error.why, error.fix) from None


def _values(text: str) -> Iterator[JSON]:
    """Yield the JSON values of a text one after the other, however they are split into lines."""
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield value
        rest = rest[end:].lstrip()


def _instruction(prompt: object) -> JSON:
    """Return the content of a conversation's first system message; None if there is none."""
    messages = prompt if isinstance(prompt, list | tuple) else ()
    return next((one.get("content", "") for one in messages if one["role"] in _INSTRUCTIONS), None)


def _first_prompts(run: Path) -> list[JSON]:
    """Return the prompts of the first step with kept rollouts; empty if no step has any."""
    found = (rollout_columns(run, step)["prompt"] for step in layout.rollout_files(run))
    return next((prompts for prompts in found if prompts), [])
