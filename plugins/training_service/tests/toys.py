"""Small models, datums and services for the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, save_model
from rillflow_training_service.checkpoints import Checkpoints
from rillflow_training_service.datums import Datum, PassRequest
from rillflow_training_service.sampling import SnapshotSampler
from rillflow_training_service.service import Service
from rillflow_training_service.shared_base import Shape, SharedBase
from rillflow_training_service.wire import FLOAT32, INT64, message

ALPHABET = "0123456789+="
NEW = NewModel(hidden=32, layers=2, heads=4, kv_heads=2, context=32, alphabet=ALPHABET)
SMALL = Shape(rank=4, unembed=False)


def toy_model(seed: int = 0) -> LanguageModel:
    return load_model(ModelConfig(new=NEW), seed=seed, device=torch.device("cpu"), base=Path())


def saved_model(folder: Path) -> Path:
    save_model(toy_model(), folder)
    return folder


def toy_service(folder: Path, source: str = "base") -> Service:
    base = SharedBase(toy_model())
    return Service(base, SnapshotSampler(base, max_rows=32), Checkpoints(folder, base, source))


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> Datum:
    """Return a datum whose targets are the next tokens."""
    made = {name: torch.tensor(values, dtype=torch.float32) for name, values in inputs.items()}
    return Datum(tokens=torch.tensor(tokens[:-1]), targets=torch.tensor(tokens[1:]), inputs=made)


def weighted(tokens: Sequence[int], prompt: int) -> Datum:
    """Return a datum of cross entropy on the tokens after the prompt."""
    return datum(tokens, weights=[float(at >= prompt) for at in range(1, len(tokens))])


def tensor_message(values: Tensor) -> Any:
    kind = FLOAT32 if values.dtype.is_floating_point else INT64
    return message(
        "Tensor", dense=values.contiguous().numpy().tobytes(), dtype=kind, shape=list(values.shape)
    )


def encoded(data: Sequence[Datum], extra: Mapping[str, Tensor] | None = None) -> list[Any]:
    """Return datums as a client sends them."""
    found = []
    for each in data:
        given = {"target_tokens": each.targets, **each.inputs, **(extra or {})}
        text = message("Text", tokens=each.tokens.to(torch.int32).numpy().tobytes())
        found.append(
            message(
                "Datum",
                chunks=[message("Chunk", text=text)],
                inputs=[
                    message("Named", key=name, value=tensor_message(value)) for name, value in given.items()
                ],
            )
        )
    return found


def asked(
    model: str, data: Sequence[Datum], loss: str = "cross_entropy", *, seq: int = 1, forward: bool = False
) -> PassRequest:
    return PassRequest(
        model_id=model, seq_id=seq, is_forward=forward, loss=loss, settings={}, data=encoded(data)
    )


def body_of(request: PassRequest) -> bytes:
    made = message(
        "Pass",
        model_id=request.model_id,
        seq_id=request.seq_id,
        data=request.data,
        loss=request.loss,
        is_forward=request.is_forward,
    )
    return bytes(made.SerializeToString())
