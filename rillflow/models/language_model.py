"""LanguageModel, ScalarModel: a module, its tokeniser and how long a text may be: what a role starts from.

ModelConfig ─┬─ path ─> pretrained ─┐                       ┌─ tried on a short copy
             └─ new ──> new_model ──┴─> module + tokeniser ─┴─ checked together ─> LanguageModel
                          └ a scalar head: kept where there is one, else new ────> ScalarModel

outline ─> module on the meta device ─┬─ cut (parallel) ─ each rank reads its slices    what a role has
                                      └─ read whole                                     load_model

either ─> .NAME.draft ─ fsync ─ rename ─> NAME     an older NAME: aside, then away
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from rillflow.errors import ConfigError, ModelError, nearest
from rillflow.models.adapters import (
    adapter_weights,
    attach,
    file_name,
    trained_beside,
    write_adapter_settings,
)
from rillflow.models.architecture import context_of, settle_attention, short_copy
from rillflow.models.attention import register
from rillflow.models.bare import character_tokenizer
from rillflow.models.config import ModelConfig
from rillflow.models.end_tokens import listed
from rillflow.models.int8 import int8_weights
from rillflow.models.locate import WEIGHTS, AdapterSource, base_of, found_adapter, locate
from rillflow.models.model_files import METADATA, file_weights, own_weights, shard_file, write_settings
from rillflow.models.new_model import new_module
from rillflow.models.positions import settle_positions
from rillflow.models.pretrained import load_module, load_scalar_module
from rillflow.models.tensor_file import write_tensors
from rillflow.models.tokenizer import Tokenizer, load_tokenizer, require_rows
from rillflow.models.unread import ALONE, Source, fill, on_device, taken_out
from rillflow.observe.durable import flush, publish_folder

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A decoder, whatever its head."""

    module: PreTrainedModel
    """The unmodified transformers module, in evaluation mode."""
    tokenizer: Tokenizer
    """Its tokeniser."""
    context: int
    """The longest row in tokens, prompt and answer together."""
    device: torch.device
    """Where it belongs."""
    source: Source
    """The weights that are to be read into the module, while it is on the meta device."""
    adapter: AdapterSource | None = None
    """What is trained in the module's place, and alone is written, hashed and published."""
    trained: frozenset[str] = frozenset()
    """The names of its parameters."""
    own: str | None = None
    """Why its attention is its own, and its rows are padded; None where they are packed."""

    def read(self) -> Self:
        """Read the whole model.

        Raises:
            ModelError: a weight cannot be read, or is not finite.
        """
        on_device(self.module, self.device)
        held = dict(self.module.named_parameters())
        fill(self.source, lambda name: [(held[name].detach(), ())])
        return self

    def own_weights(self) -> dict[str, Tensor]:
        """The weights of the whole module that belong in files, each tied one once; not copies."""
        return own_weights(self.module) if self.adapter is None else trained_beside(self.module)

    def in_files(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some shard's weights as files have them."""
        if self.adapter is None:
            return file_weights(self.module, weights)
        return {file_name(name): tensor.contiguous() for name, tensor in weights.items()}

    def file(self, index: int, count: int) -> str:
        """The name of one of so many files, from 0."""
        return shard_file(index, count) if self.adapter is None else WEIGHTS


class LanguageModel(LoadedModel):
    """A causal language model, ready to sample from and to train."""


class ScalarModel(LoadedModel):
    """A decoder with a scalar head, ready to score with and to train."""


Model = TypeVar("Model", bound=LoadedModel)


def load_model(config: ModelConfig, *, seed: int, device: torch.device, base: Path) -> LanguageModel:
    """A whole model from a directory, the hub, or made anew; see ``outline``."""
    return outline(LanguageModel, config, seed=seed, device=device, base=base, section="policy.model").read()


def load_scalar_model(
    config: ModelConfig, *, seed: int, device: torch.device, base: Path, section: str = "critic.model"
) -> ScalarModel:
    """A whole model with a scalar head: a directory's own, else a new one; see ``outline``."""
    return outline(ScalarModel, config, seed=seed, device=device, base=base, section=section).read()


def save_model(model: LoadedModel, directory: Path) -> None:
    """Write the plain directory that everybody's ``from_pretrained`` loads.

    A reader finds the old directory, or the new one whole; never a mixture. A run's ranks write theirs
    together (roles.saving).

    Raises:
        OSError: the directory cannot be written; what was there before still is.
    """
    draft = directory.with_name(f".{directory.name}.draft")
    directory.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        save_settings(model, draft)
        weights = model.in_files(model.own_weights())
        host = {name: tensor.detach().cpu() for name, tensor in weights.items()}
        write_tensors(draft / model.file(0, 1), host, METADATA)
        for path in draft.rglob("*"):
            flush(path)
        publish_folder(draft, directory)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def save_settings(model: LoadedModel, directory: Path) -> None:
    """Write what a model's directory has beside the weights.

    Raises:
        OSError: the disk fails.
    """
    with quiet():
        if model.adapter is None:
            write_settings(model.module, directory)
        else:
            write_adapter_settings(model.adapter, model.module, directory)
        model.tokenizer.save(directory)


def outline(
    kind: type[Model], config: ModelConfig, *, seed: int, device: torch.device, base: Path, section: str
) -> Model:
    """A model whose weights are not read: its attention tried, its tokeniser's tokens in its embedding.

    Args:
        kind: with logits, or with a scalar head.
        config: exactly one of ``path`` and ``new``.
        seed: decides a new model's weights; the same on every device.
        device: where the module belongs.
        base: what a relative ``path`` is relative to.
        section: what a recipe calls the config, for errors.

    Raises:
        ConfigError: both or none of ``path`` and ``new`` are given.
        ModelError: the model is not there, is none that Rillflow can drive, or has a head of several numbers.
    """
    if (config.path is None) == (config.new is None):
        raise ConfigError(
            f"{section} has both path and new" if config.new else f"{section} has neither path nor new",
            why="a model exists, or is made: exactly one of the two",
            fix='write path = "a/directory", or new = {}',
        )
    register()
    dtype, is_scalar, adapter = _DTYPES[config.dtype], kind is ScalarModel, None
    trained = frozenset[str]()
    with ALONE, quiet():
        if config.new is not None:
            inner = character_tokenizer(config.new.alphabet, config.new.context)
            count = len(inner.get_vocab())
            module, weights = new_module(
                config.new, vocabulary=count, seed=seed, dtype=dtype, is_scalar=is_scalar
            )
        else:
            assert config.path is not None  # exactly one of the two is there
            source = locate(config.path, base)
            adapter = found_adapter(source, config.adapter)
            source = base_of(source)
            module = (load_scalar_module if is_scalar else load_module)(source, dtype).eval()
            weights = taken_out(module, dtype)
            inner = load_tokenizer(source)
        own = settle_attention(module, tried := short_copy(module))
        settle_positions(module, tried)
        if adapter is not None:
            attach(module, adapter.config)
            trained = frozenset(trained_beside(module))
            weights = adapter_weights(module, int8_weights(module, weights), adapter, seed)
    names_ends = module.config.get_text_config() if is_scalar else module.generation_config
    tokenizer = Tokenizer(inner, stop_tokens=listed(names_ends.eos_token_id))
    require_rows(tokenizer, module.get_input_embeddings().weight.shape[0])
    return kind(
        module=module,
        tokenizer=tokenizer,
        context=context_of(module),
        device=device,
        source=weights,
        adapter=adapter,
        trained=trained,
        own=own,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' messages, but for errors, and bars; what the caller had set stands again."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def choose_device(name: str) -> torch.device:
    """``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        ConfigError: there is no such device; the message names those that are.
    """
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name == "auto":
        return torch.device("cuda:0" if len(there) > 1 else "cpu")
    if name == "cuda" and len(there) > 1:
        return torch.device("cuda:0")
    if name not in there:
        raise ConfigError(
            f"there is no device {name!r}",
            why=f"this machine has {', '.join(there)}",
            fix=nearest(name, ["auto", *there]),
        )
    return torch.device(name)


def require_same_tokens(model: ScalarModel, tokenizer: Tokenizer, name: str) -> None:
    """Refuse a model that would read the tokens of ``tokenizer`` as other text.

    Args:
        model: what reads the tokens.
        tokenizer: what wrote them, the policy's.
        name: what the model is called, for the error.

    Raises:
        ModelError: the two vocabularies differ.
    """
    odd = model.tokenizer.first_difference(tokenizer)
    if odd is not None:
        raise ModelError(
            f"the {name} and the policy read the token {odd} as different text",
            why="rollouts travel as the policy's tokens",
            fix=f"choose a {name} with the policy's tokeniser",
        )
