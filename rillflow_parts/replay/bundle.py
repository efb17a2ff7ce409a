"""Bundle: re-run a skipped update from its saved bundle and report the first non-finite value.

bundle ─ role, rows, settings ─> the same update on one rank ─┬─ finite ─> nothing to report
                                                              └─ NotFiniteError ─> row by row:
    weights ─> fields ─> every module's output in turn ─> terms of the loss ─> gradients
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.errors import NotFiniteError, RunDirectoryError, TrainingError
from rillflow.graph.loss import LossSection, LossTerm
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import load_model, load_scalar_model
from rillflow.records.batch import Batch, concatenate, load_batch
from rillflow.runs import layout
from rillflow.training.config import TrainConfig
from rillflow.training.guards import describe_token, loss_tokens
from rillflow.training.loss import are_sampled, loss_of
from rillflow.training.skipping import ABOUT
from rillflow.training.trainer import Objective, Trainer
from rillflow.workers.collectives import SingleRank

Losses = Mapping[str, Any]
"""Functions and sections of losses, by module and name."""


class ReplayedUpdate(NamedTuple):
    """Result of one role's replayed update."""

    role: str
    """Role that was updated."""
    recorded: str
    """Reason that the run recorded."""
    first: str | None
    """First non-finite tensor, with row and token; None if all are finite here."""


def replay_bundle(bundle: Path, algorithms: Sequence[Algorithm] = ()) -> list[ReplayedUpdate]:
    """Re-run every update of a bundle, on one rank and without changing a file.

    Args:
        bundle: the bundle's folder.
        algorithms: custom algorithms; an update's loss may be a function or a section in one of their files.

    Raises:
        RunDirectoryError: the folder is not a bundle, or is damaged.
        ModelError: its weights cannot be loaded.
    """
    folders = sorted(file.parent for file in bundle.glob(f"*/{ABOUT}"))
    if not folders:
        raise RunDirectoryError(
            f"{bundle} is not a bundle and not a run directory",
            why=f"none of its folders contains {ABOUT}",
            fix="name a run, or a folder such as RUN/bundles/step-000012; skips.jsonl lists skipped updates",
        )
    own = _losses(algorithms)
    try:
        config = json.loads((bundle / layout.CONFIG).read_text())
        return [_replayed(folder, config, own) for folder in folders]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunDirectoryError(
            f"the bundle {bundle} cannot be read", why=f"{type(error).__name__}: {error}"
        ) from error


def _losses(algorithms: Sequence[Algorithm]) -> Losses:
    """Return the functions and the loss sections in the files of these algorithms, by module and name."""
    known = [each for one in algorithms for each in vars(sys.modules[one.step.__module__]).values()]
    named = [each for each in known if isinstance(each, FunctionType) or _is_section(each)]
    return {f"{each.__module__}:{each.__qualname__}": each for each in named}


def _is_section(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, LossSection)


def _replayed(folder: Path, config: Mapping[str, Any], own: Losses) -> ReplayedUpdate:
    about = json.loads((folder / ABOUT).read_text())
    rows = [_rows(folder, index) for index in range(len(about["aims"]))]
    first = _odd_weight(folder / folder.name)
    if first is None:
        trainer, module = _trainer(folder, config, is_scalar=about["aims"][0]["is_scalar"])
        saved = zip(rows, about["aims"], strict=True)
        aims = [_aim(trainer, batch, each, config, own) for batch, each in saved]
        try:
            trainer.step(*aims)
        except NotFiniteError as error:
            first = _first(trainer, module, aims) or error.what
    return ReplayedUpdate(folder.name, about["reason"], first)


def _rows(folder: Path, aim: int) -> Batch:
    """Return the rows of one aim, from all ranks."""
    return concatenate([load_batch(file) for file in sorted(folder.glob(f"rows-{aim}-*.safetensors"))])


def _trainer(folder: Path, config: Mapping[str, Any], *, is_scalar: bool) -> tuple[Trainer, nn.Module]:
    """Return a trainer of the role's weights; its learning rate is 0, so a finite update changes nothing."""
    given = {name: config["policy"][name] for name in TrainConfig.model_fields}
    train = TrainConfig.model_validate(given).model_copy(update={"lr": 0.0})
    path, dtype = str((folder / folder.name).absolute()), config["policy"]["model"]["dtype"]
    model, where = ModelConfig(path=path, dtype=dtype), {"device": torch.device("cpu"), "base": Path()}
    if is_scalar:
        scalar = load_scalar_model(model, seed=0, section="bundle", **where)  # type: ignore[arg-type]
        return Trainer(scalar.module, train, total_steps=1), scalar.module
    language = load_model(model, seed=0, **where)  # type: ignore[arg-type]
    return Trainer(language.module, train, total_steps=1), language.module


def _aim(
    trainer: Trainer, rows: Batch, about: Mapping[str, Any], config: Mapping[str, Any], own: Losses
) -> Objective:
    """Rebuild an aim from the facts that the bundle keeps about its loss; see ``Loss.about``."""
    source, options = own.get(about["source"]) or formulas.named(about["source"]), about["options"]
    if source is None:
        raise RunDirectoryError(
            f"replay does not know the update's loss, {about['source'].replace(':', '.')}",
            why="the file of a custom algorithm defines it, and replay executes no code from a bundle",
            fix="replay with that file: python FILE.py replay BUNDLE",
        )
    if _is_section(source):
        source, options = source.model_validate(options), {}
    term = LossTerm(loss=source, count=1, options=options, name=about["loss"])
    loss = loss_of(term, about["model_outputs"], about["loss"], config["rollout"]["max_tokens"])
    sampled = not loss.is_scalar and are_sampled(rows)
    return trainer.aim(
        rows, loss, config["rollout"]["temperature"] if sampled else 1.0, weight=about["weight"]
    )


def _odd_weight(folder: Path) -> str | None:
    """Return the first non-finite weight; the module is not loaded if there is one."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            odd = (~weight.isfinite()).nonzero()
            if len(odd):
                return f"the weight {name} at {odd[0].tolist()}"
    return None


def _first(trainer: Trainer, module: nn.Module, aims: list[Objective]) -> str | None:
    """Return the first non-finite tensor, with each row, or unit of rows, run alone."""
    for look in (_forward, _backward):
        for aim in aims:
            step = aim.loss.rows_together
            for start in range(0, len(aim.rows), step):
                rows = aim.rows.slice(start, start + step)
                try:
                    found = look(trainer, module, replace(aim, rows=rows))
                except NotFiniteError as error:
                    found = f"row ({rows.row_id(0)}): {error.what}"
                except TrainingError:  # it has no loss token
                    continue
                if found is not None:
                    return found
    return None


def _forward(trainer: Trainer, module: nn.Module, aim: Objective) -> str | None:
    """Return the first non-finite value up to the terms of the loss; None if all are finite."""
    part = aim.loss.settled(aim.loss.prepare(aim.rows), aim.rows, aim.score, SingleRank())
    assert part is not None, "there are rows"
    tokens, seen = loss_tokens(part), list[str]()
    with ExitStack() as stack, torch.no_grad():
        for name, each in module.named_modules():
            stack.callback(each.register_forward_hook(_look(name, part, seen)).remove)
        read = trainer.scorer.forward(part, aim.reader)
    odd = (~aim.loss(read, tokens).terms.isfinite()).nonzero()
    if not len(odd) or seen:
        return seen[0] if seen else None
    index = int(odd[0])
    return f"the loss at {describe_token(tokens, index)}: {aim.reader.describe(read, index)}"


def _backward(trainer: Trainer, _: nn.Module, aim: Objective) -> None:
    trainer.step(aim)


def _look(name: str, rows: Batch, seen: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook that records a module's non-finite output; packed tokens lie row after row."""

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or first.dim() != 3 or bool(first.isfinite().all()):
            return
        place = int((~first.isfinite()).any(-1)[0].nonzero()[0])
        tokens = rows.ragged("tokens")
        row, where = int(tokens.row_of[place]), int(tokens.positions[place])
        token = f"token {where} (id {int(tokens.values[place])}) of row ({rows.row_id(row)})"
        seen.append(f"the output of {name} at {token}")

    return hook
