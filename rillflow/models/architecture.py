"""Architecture: is this a decoder that Rillflow's attention can drive? Found out by trying it.

    config ── causal_class, scalar_class ──> its module's class ── built_with: is its attention replaceable?
    module ── short_copy: its first layers, with random weights, so that a trial is small however large it is
                 └─ settle_attention ── 8 tokens through an attention plan, the same through its own attention
                       every layer asked the plan once, the outputs agree? ─ yes ─> Rillflow's, packed rows
                       no: a row's outputs depend on no row beside it, no token behind it? ─> its own, padded
                       no: refused

What the trial cannot show, a long context would: attention in chunks is left to the module by its name.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rillflow.errors import ModelError
from rillflow.models.attention import ATTENTION, Scores, causal

_TRIAL_TOKENS = 8
"""How many tokens a module is tried on."""
_TRIAL_VOCABULARY = 256
"""How many of its tokens it knows there."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of the outputs, over their largest; rounding stays a tenth below it or less."""
_LAYERS = {"full_attention", "sliding_attention"}


class Witness:
    """An attention plan that attends plainly and remembers who asked, and with what."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        """Which layers asked, in the order of their calls."""
        self.states: dict[int, tuple[Tensor, Tensor]] = {}
        """The keys and values of each, [N, K, T, D]."""
        self.windows: dict[int, int | None] = {}
        """How many tokens back each sees; None for all."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See AttentionPlan."""
        self.layers.append(layer)
        self.states[layer], self.windows[layer] = (key, value), scores.window
        return causal(query, key, value, scores).transpose(1, 2)


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The module class of a config.

    Raises:
        ModelError: no causal language model.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"a model of type {config.model_type!r} is no causal language model",
            why="transformers has no decoder of this type that continues a text",
            fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
        )
    found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found


def built_with(kind: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """The attention that a module is made with: Rillflow's, or its own where that is known not to do."""
    return ATTENTION if _odd(kind, config) is None else _own(kind)


def is_padded(module: PreTrainedModel) -> bool:
    """Whether a module attends by itself, so that its rows lie side by side, filled up behind their ends."""
    return bool(module.config._attn_implementation != ATTENTION)


def settle_attention(module: PreTrainedModel, tried: PreTrainedModel) -> str | None:
    """Leave a module Rillflow's attention if that computes what its own does, else give it its own.

    Args:
        module: the decoder; it may be on the meta device.
        tried: its ``short_copy``, by which it is found out.

    Returns:
        Why it has its own; None where it has Rillflow's.

    Raises:
        ModelError: neither does: with its own, a row's outputs depend on tokens behind it or rows beside it.
    """
    try:
        odd = _odd(type(module), module.config)
        if odd is not None:
            raise _not_replaceable(type(module).__name__, odd)
        check_attention(tried)
    except ModelError as error:
        for each in (module, tried):
            each.set_attn_implementation(_own(type(module)))
        _check_rows(tried, error)
        return f"{error.what} ({error.why})"
    return None


def _check_rows(module: PreTrainedModel, met: ModelError) -> None:
    """Show that a row says the same alone, before any other tokens and beside any other row."""
    first = trial_positions(module) % module.config.get_text_config().vocab_size
    half = (first.shape[1] + 1) // 2
    second = torch.cat([first[:, :half], first[:, half:].flip(1)], 1)
    try:
        beside = trial(module, input_ids=torch.cat([first, second]))
        alone, begun = trial(module, input_ids=first), trial(module, input_ids=first[:, :half])
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise _neither(met, f"ends in {type(error).__name__}: {error}") from error
    difference = max(relative_difference(beside[:1], alone), relative_difference(beside[1:, :half], begun))
    if not difference <= _TOLERANCE[module.dtype]:
        raise _neither(
            met, f"moves a row's outputs by what lies behind it, by {difference:.2g} of the largest"
        )


def _neither(met: ModelError, what: str) -> ModelError:
    return ModelError(met.what, why=f"{met.why}; its own attention {what}", fix=met.fix)


def _own(kind: type[PreTrainedModel]) -> str:
    return "sdpa" if kind._supports_sdpa else "eager"


def _odd(kind: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Why the attention of a type cannot be replaced, where that needs no trial."""
    if not kind.is_backend_compatible():
        return "it does not use transformers' attention interface"
    odd = sorted(set(config.get_text_config().to_dict().get("layer_types") or ()) - _LAYERS)
    return f"it has layers of {odd[0]!r}" if odd else None


def scalar_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a decoder of this config with a head of numbers.

    Raises:
        ModelError: as ``causal_class``; or transformers has none of this type.
    """
    causal_class(config)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"a model of type {config.model_type!r} cannot have a scalar head",
            why="transformers has no ForSequenceClassification of this type",
            fix="choose a decoder that has one, such as qwen2, llama, qwen3 or gpt2",
        )
    found: type[PreTrainedModel] = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    return found


def short_copy(module: PreTrainedModel) -> PreTrainedModel:
    """What a decoder is tried on: its first layers with random weights, and a few of its tokens, on the CPU.

    As many layers as show every kind that the decoder has, but two at least.

    Args:
        module: it may be on the meta device; its config, its kinds of layers and its type are looked at.
    """
    config = copy.deepcopy(module.config)
    text = config.get_text_config()
    count = text.num_hidden_layers
    layers = next((part for part in module.base_model.children() if _are_layers(part, count)), ())
    of = text.to_dict().get("layer_types") or [""] * count
    kinds = [(kind, *map(type, layer.modules())) for kind, layer in zip(of, layers, strict=False)]
    shown = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]) if kinds else count
    for name, value in text.to_dict().items() if shown < count else ():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:shown])
    text.num_hidden_layers, text.pad_token_id = min(shown, count), None
    text.vocab_size = min(text.vocab_size, _TRIAL_VOCABULARY)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            found = type(module)(config).eval()
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise ModelError(
                f"{type(module).__name__} cannot be tried with {shown} layers",
                why=f"{type(error).__name__}: {error}",
                fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
            ) from error
        for parameter in found.parameters():
            if parameter.dim() == 1:  # a bias of 0 would hide that it is added twice
                parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
            parameter.data = parameter.data.to(module.dtype)
    return found


def _are_layers(part: nn.Module, count: int) -> bool:
    return isinstance(part, nn.ModuleList) and len(part) == count


def check_attention(module: PreTrainedModel) -> None:
    """Show that the module, built with Rillflow's attention, computes what it computes with its own.

    Raises:
        ModelError: it does not, or a layer computes its attention elsewhere.
    """
    layers = module.config.get_text_config().num_hidden_layers
    name, witness = type(module).__name__, Witness()
    try:
        ours = trial(module, attention_plan=witness)
        module.set_attn_implementation("eager")
        own = trial(module, position_ids=None)
        module.set_attn_implementation(ATTENTION)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise _not_replaceable(name, f"a trial ended in {type(error).__name__}: {error}") from error
    if sorted(witness.layers) != list(range(layers)):
        asked = len(set(witness.layers))
        raise _not_replaceable(name, f"{asked} of its {layers} layers asked for it")
    difference = relative_difference(ours, own)
    if not difference <= _TOLERANCE[module.dtype]:
        raise ModelError(
            f"{name} computes other {_output(module)} with Rillflow's attention, "
            f"by {difference:.2g} of the largest",
            why="its own attention is not causal, adds a bias to the scores, or its weights are not finite",
            fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
        )


def trial(
    module: Any, *, is_last: bool = True, graph: bool = False, tokens: int | None = None, **given: Any
) -> Tensor:
    """[1, T, ...] what a module says to a few tokens: logits, or hidden states where it has a scalar head.

    Args:
        module: a decoder or what is left of it.
        is_last: whether its head is its own, and not another pipeline stage's.
        graph: whether the pass is made as one that a backward pass follows.
        tokens: of the first so many tokens alone.
        given: the module's arguments in the place of tokens at positions from 0 on.
    """
    positions = trial_positions(module)[:, :tokens]
    ids = positions % module.config.get_text_config().vocab_size
    where = {} if is_padded(module) else {"position_ids": positions}  # not every module can be told
    inputs = {"input_ids": ids, **where, "use_cache": False, **given}
    output = _output(module) if is_last else "last_hidden_state"
    with torch.set_grad_enabled(graph):
        found: Tensor = (module if output == "logits" else module.base_model)(**inputs)[output]
        return found.detach()


def has_plain_head(module: Any) -> bool:
    """Whether logits are the product of last hidden states and a head's weight, and nothing besides."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or module.base_model is module:
        return False
    with torch.no_grad():
        return torch.equal(head(trial(module, is_last=False)), trial(module))


def trial_positions(module: Any) -> Tensor:
    """[1, T] the positions of the tokens that a module is tried on."""
    return torch.arange(min(_TRIAL_TOKENS, context_of(module)), device=module.device)[None]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors of one shape, over the largest number expected."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def context_of(module: PreTrainedModel) -> int:
    """The longest row a module has positions for, in tokens."""
    try:
        return int(module.config.get_text_config().max_position_embeddings)
    except AttributeError:
        raise ModelError(
            f"the config of {type(module).__name__} does not say how long a text may be",
            why="it has no max_position_embeddings",
            fix="add it to the model's config.json",
        ) from None


def recomputing_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of which transformers can keep the inputs alone, and compute the rest a second time."""
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def vocabulary_of(module: nn.Module) -> int:
    """How many tokens a module knows, wherever their embeddings lie."""
    embedding: nn.Embedding = module.get_input_embeddings()  # type: ignore[operator]
    return embedding.num_embeddings


def _output(module: Any) -> str:
    """What is compared: the module's logits, or where the head says little, the body's last hidden states."""
    return "last_hidden_state" if module.get_output_embeddings() is None else "logits"


def _not_replaceable(name: str, why: str) -> ModelError:
    return ModelError(
        f"the attention of {name} cannot be replaced",
        why=why,
        fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
    )
