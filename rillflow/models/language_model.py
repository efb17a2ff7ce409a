"""LanguageModel, ScalarModel: a module, its tokeniser and its context length, from which a role starts.

ModelConfig ─┬─ path ─> pretrained ─┐                       ┌─ tried on a short copy
             └─ new ──> new_model ──┴─> module + tokeniser ─┴─ checked together ─> LanguageModel
                          └ a scalar head: kept if there is one, else new ─────────> ScalarModel

outline ─> module on the meta device ─┬─ cut (parallel) ─ each rank reads its slices    for roles
                                      └─ read whole                                     load_model

save_model ─> .NAME.draft ─ fsync ─ rename ─> NAME     an older NAME is moved away, then deleted
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from rillflow.errors import ConfigError, ModelError, nearest
from rillflow.models.adapter_tokenizer import require_fits_base, tokenizer_source
from rillflow.models.adapters import (
    adapter_weights,
    attach,
    file_name,
    trained_beside,
    write_adapter_settings,
)
from rillflow.models.architecture import context_of, settle_attention, settle_positions, short_copy
from rillflow.models.attention import register
from rillflow.models.bare import character_tokenizer
from rillflow.models.config import ModelConfig
from rillflow.models.directory_checks import listed
from rillflow.models.lazy_weights import ALONE, Source, fill, on_device, taken_out
from rillflow.models.load_tokenizer import load_tokenizer
from rillflow.models.locate import base_of, found_adapter, locate
from rillflow.models.model_files import (
    METADATA,
    file_weights,
    own_weights,
    shard_file,
    write_settings,
    write_tensors,
)
from rillflow.models.modules import load_module, load_scalar_module, new_module
from rillflow.models.peft_settings import WEIGHTS, AdapterSource
from rillflow.models.quantised import quantised_weights
from rillflow.models.tokenizer import Tokenizer
from rillflow.runs.durable import flush, publish_folder

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A decoder with any head."""

    module: PreTrainedModel
    """The unmodified transformers module, in evaluation mode."""
    tokenizer: Tokenizer
    """The model's tokeniser."""
    context: int
    """The longest row in tokens, prompt and completion together."""
    device: torch.device
    """Device of the loaded module."""
    source: Source
    """The weights to read into the module, which is on the meta device until then."""
    adapter: AdapterSource | None = None
    """The adapter, which alone is trained, written, hashed and published; None to train the module."""
    trained: frozenset[str] = frozenset()
    """Names of the adapter's parameters."""
    own: str | None = None
    """Why it uses its own attention and padded rows; None for Rillflow's attention and packed rows."""

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
        """Return the weights that belong in files, without copies, each tied weight once."""
        return own_weights(self.module) if self.adapter is None else trained_beside(self.module)

    def in_files(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a shard under the names, and in the format, of files."""
        if self.adapter is None:
            return file_weights(self.module, weights)
        return {file_name(name): tensor.contiguous() for name, tensor in weights.items()}

    def file(self, index: int, count: int) -> str:
        """Return the name of file ``index`` of ``count``, from 0."""
        return shard_file(index, count) if self.adapter is None else WEIGHTS


class LanguageModel(LoadedModel):
    """A causal language model, ready to sample from and to train."""


class ScalarModel(LoadedModel):
    """A decoder with a scalar head, ready to score with and to train."""


Model = TypeVar("Model", bound=LoadedModel)


def load_model(config: ModelConfig, *, seed: int, device: torch.device, base: Path) -> LanguageModel:
    """Load a whole model from a directory or the hub, or make a new one; see ``outline``."""
    return outline(LanguageModel, config, seed=seed, device=device, base=base, section="policy.model").read()


def load_scalar_model(
    config: ModelConfig, *, seed: int, device: torch.device, base: Path, section: str = "critic.model"
) -> ScalarModel:
    """Load a whole model with the directory's scalar head, or a new one; see ``outline``."""
    return outline(ScalarModel, config, seed=seed, device=device, base=base, section=section).read()


def save_model(model: LoadedModel, directory: Path) -> None:
    """Write a directory that every ``from_pretrained`` loads.

    A reader finds the old directory or the whole new one, never a mixture. The ranks of a run write theirs
    together (roles.saving).

    Raises:
        OSError: the directory cannot be written; the old one is still there.
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
    """Write a model's directory except its weights.

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
    """Return a model without its weights; its attention has been tried, its embedding has a row per token.

    Args:
        kind: with logits, or with a scalar head.
        config: exactly one of ``path`` and ``new``.
        seed: determines a new model's weights, equal on every device.
        device: device of the loaded module.
        base: directory that a relative ``path`` is relative to.
        section: the config's section in a recipe, for errors.

    Raises:
        ConfigError: both or none of ``path`` and ``new`` are given.
        ModelError: the model is missing or unsupported, or its head gives several numbers.
    """
    _require_one_source(config, section)
    register()
    dtype, is_scalar, adapter = _DTYPES[config.dtype], kind is ScalarModel, None
    trained, source, read_from = frozenset[str](), "", ""
    with ALONE, quiet():
        if config.new is not None:
            inner = character_tokenizer(config.new.alphabet, config.new.context)
            count = len(inner.get_vocab())
            module, weights = new_module(
                config.new, vocabulary=count, seed=seed, dtype=dtype, is_scalar=is_scalar
            )
        else:
            assert config.path is not None  # exactly one of the two is there
            named = locate(config.path, base)
            adapter, source = found_adapter(named, config.adapter), base_of(named)
            adapter = adapter and replace(adapter, base=source)
            module = (load_scalar_module if is_scalar else load_module)(source, dtype).eval()
            weights = taken_out(module, dtype)
            read_from = tokenizer_source(named)
            inner = load_tokenizer(read_from)
        own = settle_attention(module, tried := short_copy(module))
        settle_positions(module, tried)
        if adapter is not None:
            attach(module, adapter.config)
            trained = frozenset(trained_beside(module))
            weights = adapter_weights(module, quantised_weights(module, weights), adapter, seed)
    names_ends = module.config.get_text_config() if is_scalar else module.generation_config
    tokenizer = Tokenizer(inner, stop_tokens=listed(names_ends.eos_token_id))
    require_fits_base(tokenizer, read_from, source, module.get_input_embeddings().weight.shape[0])
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


def _require_one_source(config: ModelConfig, section: str) -> None:
    if (config.path is None) == (config.new is None):
        raise ConfigError(
            f"{section} has both path and new" if config.new else f"{section} has neither path nor new",
            why="a model is either loaded from path or made new",
            fix='write path = "a/directory", or new = {}',
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and all messages but errors; restore the settings afterwards."""
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
    """Return the device named ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        ConfigError: there is no such device; the message names the existing ones.
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
    """Refuse a model that would decode the tokens of ``tokenizer`` to other text.

    Args:
        model: the model that reads the tokens.
        tokenizer: the policy's tokeniser, which made them.
        name: the model's name, for the error.

    Raises:
        ModelError: the two vocabularies differ.
    """
    odd = model.tokenizer.first_difference(tokenizer)
    if odd is not None:
        raise ModelError(
            f"the {name} and the policy decode the token {odd} to different text",
            why=f"the {name} receives rollouts as the policy's token ids",
            fix=f"choose a {name} with the policy's tokeniser",
        )
