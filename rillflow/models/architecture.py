"""Architecture: is this a decoder that Rillflow's attention can drive? Found out by trying it.

    config ── causal_class, scalar_class ──> its module's class    known, and its attention replaceable?
    module ── short_copy: its first layers, with random weights, so that a trial is small however large it is
                 └─ check_attention: 8 tokens through an attention plan, the same through its own attention
                       every layer asked the plan once?  the outputs agree?

What the trial cannot show, a long context would: attention in chunks is refused by its name.
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
        ModelError: no causal language model, or one whose attention cannot be replaced.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"a model of type {config.model_type!r} is no causal language model",
            why="transformers has no decoder of this type that continues a text",
            fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
        )
    found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not found.is_backend_compatible():
        raise _not_replaceable(found.__name__, "it does not use transformers' attention interface")
    settings = config.get_text_config().to_dict()
    odd = sorted(set(settings.get("layer_types") or ()) - _LAYERS)
    if odd:
        raise _not_replaceable(found.__name__, f"it has layers of {odd[0]!r}")
    return found


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
        found = type(module)(config).eval()
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
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False, **given}
    output = _output(module) if is_last else "last_hidden_state"
    with torch.set_grad_enabled(graph):
        found: Tensor = (module if output == "logits" else module.base_model)(**inputs)[output]
        return found.detach()


def has_plain_head(module: Any) -> bool:
    """Whether logits are the product of last hidden states and a head's weight, and nothing besides."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
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
        why=f"{why}; sampling and training need every layer's, full or sliding",
        fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
    )
