"""Ask: a conversation with what a run has trained so far.

run directory ─ checkpoint ─> model ─> engine ─┐
prompt ─ tokens ───────────────────────────────┴─ generate ─> answer
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, cast

import torch

from rillflow.assembly.trained import model_directory
from rillflow.config.load import validate
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import choose_device, load_model
from rillflow.models.tokenizer import Chat
from rillflow.observe import layout
from rillflow.observe.json_lines import read_lines
from rillflow.observe.reader import read_config
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import completions
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine

ASKED_EPOCH = -2
"""The epoch in the row ids of asked prompts: their random numbers are no other row's."""


class Respondent:
    """The model of a run, ready to answer.

    Args:
        run: the run directory.
        step: of which checkpoint; the newest one if None.
        temperature: 0 takes the likeliest token.
        max_tokens: longest answer; as in training if None.
        seed: of the answers' random numbers; another one every time if None.

    Raises:
        RunDirectoryError: it is no run directory, has no such checkpoint, or trains no policy.
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        run: Path,
        *,
        step: int | None = None,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> None:
        config = cast(dict[str, Any], read_config(run))
        trained = validate(RolloutConfig, config["rollout"], str(run / layout.CONFIG))
        limit = trained.max_tokens if max_tokens is None else max_tokens
        asked = {"temperature": temperature, "max_tokens": limit, "stop": trained.stop, "max_rows": 1}
        rollout = validate(RolloutConfig, asked, "the question")
        self._model = load_model(
            ModelConfig(
                path=str(model_directory(run, "policy", step).absolute()),
                dtype=config["policy"]["model"]["dtype"],
            ),
            seed=0,
            device=choose_device("auto"),
            base=Path(),
        )
        stop = {self._model.tokenizer.token_of(text) for text in rollout.stop}
        self._engine = NativeEngine(
            self._model.module,
            rollout,
            stop_tokens=frozenset(stop | self._model.tokenizer.stop_tokens),
            seed=secrets.randbelow(2**31) if seed is None else seed,
            context=self._model.context,
        )
        self._is_chat = asks_in_chat(run)
        self._asked = 0

    def answer(self, prompt: str) -> str:
        """What the model writes after a prompt; each question has its own random numbers.

        Raises:
            ModelError: the tokeniser lacks a character.
            RolloutError: the prompt leaves no room in the context.
        """
        tokenizer = self._model.tokenizer
        chat = Chat(turns=[{"role": "user", "content": prompt}])
        tokens = tokenizer.encode_chats([chat])[0] if self._is_chat else tokenizer.encode(prompt)
        prompts = Batch(
            ids=row_ids([RowId(ASKED_EPOCH, self._asked, 0)]),
            fields={"tokens": Ragged.from_rows([tokens], torch.int64), "columns": Ragged.from_text(["{}"])},
        )
        self._asked += 1
        rollouts = self._engine.generate(prompts)
        return tokenizer.decode(completions(rollouts).row(0).tolist())


def asks_in_chat(run: Path) -> bool:
    """Whether the run's own prompts are chat messages rather than texts."""
    for file in layout.rollout_files(run).values():
        for line in read_lines(file).lines[:1]:
            return isinstance(line.data["prompt"], list)
    return False
