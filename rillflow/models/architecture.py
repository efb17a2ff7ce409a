"""Architecture: tests whether a decoder works with Rillflow's attention, by a trial.

    config ── causal_class, scalar_class ──> its module's class ── built_with: is its attention replaceable?
    module ── short_copy: its first layers, with random weights, so that trials of large models are cheap
                 └─ settle_attention ── 8 tokens through an attention plan, the same through its own attention
                       every layer used the plan once, the outputs agree? ── yes ─> Rillflow's, packed rows
                       no: a row's outputs depend on no other row and no later token? ─> its own, padded
                       no: refused

    settle_positions ── the last token at position 7, or at the context's last ── do the other logits differ?
                                             no ──> the module as it is
                                             yes ─> AtContext ─ still? refused

Some rotary embeddings (``longrope``, ``dynamic``) choose their frequencies by the longest position of a pass.
Then sampler, trainer and every division into micro-batches would run different models. So these embeddings
get the context's last position in every pass: every row is computed as if it filled the context.

A scalar head gives one number per token, on top of the decoder's body:

    tokens ── module.base_model ──> hidden states [U, D] ── head, a linear layer to one number ──> [U]

The module is transformers' own, unmodified. Its own forward pass returns one number per row
(ForSequenceClassification) or has dropout (ForTokenClassification), so body and head are called separately.

A short trial cannot detect chunked attention, whose effect appears only in long contexts. Such layers are
recognised by name, and the module keeps its own attention.

Legend: U tokens of all rows, laid end to end; D hidden size.
"""

from __future__ import annotations

import copy
from inspect import signature
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
"""Number of tokens in a trial."""
_TRIAL_VOCABULARY = 256
"""Maximum vocabulary of the trial copy."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest relative difference of the outputs; rounding stays below a tenth of this tolerance."""
_LAYERS = {"full_attention", "sliding_attention"}


class Witness:
    """An attention plan that attends causally and records the calls of the layers."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        """Layers in the order of their calls."""
        self.states: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of each layer, [N, K, T, D]."""
        self.windows: dict[int, int | None] = {}
        """Window of each layer in tokens; None for no window."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See AttentionPlan."""
        self.layers.append(layer)
        self.states[layer], self.windows[layer] = (key, value), scores.window
        return causal(query, key, value, scores).transpose(1, 2)


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the module class of a config.

    Raises:
        ModelError: it is not a causal language model.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"a model of type {config.model_type!r} is not a causal language model",
            why="transformers has no causal language model of this type",
            fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
        )
    found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found


def built_with(kind: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Return the attention to build a module with: Rillflow's, or its own if Rillflow's cannot work."""
    return ATTENTION if _odd(kind, config) is None else _own(kind)


def is_padded(module: PreTrainedModel) -> bool:
    """Return whether a module uses its own attention and therefore padded rows."""
    return bool(module.config._attn_implementation != ATTENTION)


def settle_attention(module: PreTrainedModel, tried: PreTrainedModel) -> str | None:
    """Keep Rillflow's attention if it agrees with the module's attention; otherwise restore the latter.

    Args:
        module: the decoder; it may be on the meta device.
        tried: its ``short_copy``, used for the trial.

    Returns:
        Why it uses its own attention; None if it uses Rillflow's.

    Raises:
        ModelError: neither works: with its own, a row's outputs depend on later tokens or on other rows.
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
    """Check that a row's outputs depend on no later tokens and no other rows."""
    first = trial_positions(module) % module.config.get_text_config().vocab_size
    half = (first.shape[1] + 1) // 2
    second = torch.cat([first[:, :half], first[:, half:].flip(1)], 1)
    try:
        beside = trial(module, input_ids=torch.cat([first, second]))
        alone, begun = trial(module, input_ids=first), trial(module, input_ids=first[:, :half])
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise _neither(met, f"fails with {type(error).__name__}: {error}") from error
    difference = max(relative_difference(beside[:1], alone), relative_difference(beside[1:, :half], begun))
    if not difference <= _TOLERANCE[module.dtype]:
        raise _neither(
            met, f"lets later tokens or other rows change a row's outputs, by {difference:.2g} of the largest"
        )


def _neither(met: ModelError, what: str) -> ModelError:
    return ModelError(met.what, why=f"{met.why}; its own attention {what}", fix=met.fix)


def _own(kind: type[PreTrainedModel]) -> str:
    return "sdpa" if kind._supports_sdpa else "eager"


def _odd(kind: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Return why the attention of a type cannot be replaced, if that is known without a trial; else None."""
    if not kind.is_backend_compatible():
        return "it does not use transformers' attention interface"
    odd = sorted(set(config.get_text_config().to_dict().get("layer_types") or ()) - _LAYERS)
    return f"it has layers of {odd[0]!r}" if odd else None


def scalar_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a decoder of this config with a scalar head.

    Raises:
        ModelError: as ``causal_class``; or transformers has no such class for this type.
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
    """Return a copy for trials: the first layers with random weights and a small vocabulary, on the CPU.

    It has enough layers to include every kind of layer of the decoder, and at least two.

    Args:
        module: the decoder, possibly on the meta device; only its config and its layers' types are used.
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
                f"{type(module).__name__} cannot be built with {shown} layers for a trial",
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
    """Check that the module gives the same outputs with Rillflow's attention as with its own.

    Raises:
        ModelError: it does not, or a layer bypasses Rillflow's attention.
    """
    layers = module.config.get_text_config().num_hidden_layers
    name, witness = type(module).__name__, Witness()
    try:
        ours = trial(module, attention_plan=witness)
        module.set_attn_implementation("eager")
        own = trial(module, position_ids=None)
        module.set_attn_implementation(ATTENTION)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise _not_replaceable(name, f"a trial run failed with {type(error).__name__}: {error}") from error
    if sorted(witness.layers) != list(range(layers)):
        asked = len(set(witness.layers))
        raise _not_replaceable(name, f"only {asked} of its {layers} layers called Rillflow's attention")
    difference = relative_difference(ours, own)
    if not difference <= _TOLERANCE[module.dtype]:
        raise ModelError(
            f"Rillflow's attention changes the {_output(module)} of {name}, "
            f"by {difference:.2g} of the largest",
            why="its own attention is not causal, adds a bias to the scores, or has non-finite weights",
            fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
        )


def trial(
    module: Any, *, is_last: bool = True, graph: bool = False, tokens: int | None = None, **given: Any
) -> Tensor:
    """Return [1, T, ...] logits for a few tokens, or hidden states if the module has a scalar head.

    Args:
        module: a decoder or a part of one.
        is_last: whether the module has the head itself, not another pipeline stage.
        graph: whether the pass records a graph for a backward pass.
        tokens: use only this many tokens.
        given: arguments of the module that replace the default, tokens at positions from 0 on.
    """
    positions = trial_positions(module)[:, :tokens]
    ids = positions % module.config.get_text_config().vocab_size
    where = {} if is_padded(module) else {"position_ids": positions}  # some modules accept no positions
    inputs = {"input_ids": ids, **where, "use_cache": False, **given}
    output = _output(module) if is_last else "last_hidden_state"
    with torch.set_grad_enabled(graph):
        found: Tensor = (module if output == "logits" else module.base_model)(**inputs)[output]
        return found.detach()


def has_plain_head(module: Any) -> bool:
    """Return whether logits are just the product of last hidden states and the head's weight."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or module.base_model is module:
        return False
    with torch.no_grad():
        return torch.equal(head(trial(module, is_last=False)), trial(module))


def trial_positions(module: Any) -> Tensor:
    """Return [1, T] the positions of the trial's tokens."""
    return torch.arange(min(_TRIAL_TOKENS, context_of(module)), device=module.device)[None]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference over the largest absolute expected value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def context_of(module: PreTrainedModel) -> int:
    """Return the maximum length of a row in tokens, from the module's number of positions."""
    try:
        return int(module.config.get_text_config().max_position_embeddings)
    except AttributeError:
        raise ModelError(
            f"the config of {type(module).__name__} has no context length",
            why="it has no max_position_embeddings",
            fix="add it to the model's config.json",
        ) from None


def recomputing_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that support transformers' gradient checkpointing."""
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def vocabulary_of(module: nn.Module) -> int:
    """Return the size of the module's vocabulary."""
    embedding: nn.Embedding = module.get_input_embeddings()  # type: ignore[operator]
    return embedding.num_embeddings


def _output(module: Any) -> str:
    """Return the name of the compared output: logits, or last hidden states without a vocabulary head."""
    return "last_hidden_state" if module.get_output_embeddings() is None else "logits"


def _not_replaceable(name: str, why: str) -> ModelError:
    return ModelError(
        f"the attention of {name} cannot be replaced",
        why=why,
        fix="choose a decoder, such as qwen2, llama, qwen3 or gpt2",
    )


_POSITION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest difference of the outputs over the largest output; other rows change only the last bits."""


class AtContext(nn.Module):
    """A rotary embedding that always gets the context's last position in addition to those of a pass.

    Args:
        rotary: transformers' embedding; for a tensor and positions [..., T] it returns tensors [..., T, D].
        context: maximum tokens of a row.
    """

    def __init__(self, rotary: nn.Module, context: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.context = context

    def forward(self, x: Tensor, position_ids: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return the embedding of these positions."""
        last = torch.full_like(position_ids[..., :1], self.context - 1)
        found = self.rotary(x, torch.cat([position_ids, last], -1), *rest, **named)
        return tuple(part[..., :-1, :] for part in found)


def settle_positions(module: PreTrainedModel, tried: PreTrainedModel) -> None:
    """Make a row's outputs independent of other rows: always those of a full context.

    Args:
        module: the decoder; it may be on the meta device.
        tried: its ``architecture.short_copy``, used for the trial.

    Raises:
        ModelError: the module uses the longest row elsewhere than in its rotary embeddings.
    """
    if is_padded(tried) and "position_ids" not in signature(type(tried).forward).parameters:
        return  # positions cannot be passed to it
    if _difference(tried) == 0:
        return
    for each in (tried, module):
        for name in [name for name, part in each.named_modules() if _is_rotary(part)]:
            each.set_submodule(name, AtContext(each.get_submodule(name), context_of(each)))
    difference = _difference(tried)
    if not difference <= _POSITION_TOLERANCE[module.dtype]:
        raise ModelError(
            f"a longer row in the batch changes a row's outputs of {type(module).__name__}, "
            f"by {difference:.2g} of the largest",
            why="sampler and trainer batch rows differently, so their outputs would differ",
            fix="choose a model whose position embeddings do not depend on the longest row",
        )


def _difference(module: PreTrainedModel) -> float:
    """Return the relative change of a row's outputs when the pass ends at the context's last position."""
    far = trial_positions(module)
    far[:, -1] = context_of(module) - 1
    return relative_difference(
        trial(module, position_ids=far)[:, :-1],
        trial(module, position_ids=trial_positions(module))[:, :-1],
    )


def _is_rotary(part: nn.Module) -> bool:
    """Return whether the module itself is a rotary embedding: it has a buffer of frequencies."""
    own = dict(part.named_buffers(recurse=False))
    return any(name.endswith("inv_freq") for name in own)


def head_of(module: Any) -> nn.Linear:
    """Return the head: the only linear layer outside the body.

    Raises:
        ModelError: there is none, or it gives more than one number.
    """
    body = module.base_model
    found = [part for part in module.children() if part is not body and isinstance(part, nn.Linear)]
    if len(found) != 1 or found[0].out_features != 1:
        shape = [f"{part.in_features} to {part.out_features}" for part in found]
        raise ModelError(
            f"{type(module).__name__} has no scalar head",
            why=f"outside its body it has {len(found)} linear layers {', '.join(shape)}; a head is one, to 1",
            fix="load it with load_scalar_model",
        )
    return found[0]


def head_weights(module: PreTrainedModel) -> frozenset[str]:
    """Return the names of the head's parameters in the module."""
    own = {id(parameter) for parameter in head_of(module).parameters()}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in own)


def start_head(module: PreTrainedModel) -> None:
    """Set a new head to return 0 for every token."""
    for parameter in head_of(module).parameters():
        nn.init.zeros_(parameter)


def require_one_number(config: PreTrainedConfig) -> None:
    """Set a config to a head of one number, read at a row's last token.

    With a padding token, transformers would skip trailing ones to find the last token. A row's last token may
    be the end token, which many models also use for padding.
    """
    config.num_labels = 1
    config.get_text_config().pad_token_id = None


def token_scores(body: Any, head: nn.Linear, inputs: dict[str, Any]) -> Tensor:
    """Return [U] the head's number at every token, row after row, in float32 or wider."""
    hidden = body(**inputs).last_hidden_state.flatten(0, 1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(wide)
    return nn.functional.linear(hidden.to(wide), head.weight.to(wide), bias).squeeze(-1)
