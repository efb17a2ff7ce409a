"""Core: all that names vLLM: its engine in this process, what it is asked, what it answers.

    Ask ─ add ─> LLMEngine ─ step: model ─ logits [n, V] ─ Draws ─ one token a row is left ─> Piece
                    ^                                        └─ uniform(seed, row id, position), as the native
    reload: (name, weight), then no key or value of before         engine draws

vLLM's own sampler takes the likeliest token that ``Draws`` leaves: the only one, its log probability for a
logit.

Legend: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from rillflow.formulas.counter import uniform
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.sampling import DrawSettings, draw

_ASK = "rillflow"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """How one row is continued."""

    row: RowId
    """The row's id, from which its random numbers follow."""
    sampling: SamplingConfig
    """How its tokens are drawn."""
    seed: int
    """Of the run."""
    begin: int
    """The place of its first new token."""
    given: tuple[int, ...] = ()
    """Tokens that follow whatever would be drawn, where their log probabilities are asked for."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a step added to a row."""

    name: str
    """The request's."""
    tokens: Sequence[int]
    """The new tokens."""
    logprobs: Sequence[float]
    """Theirs, in the whole vocabulary, after temperature."""
    has_ended: bool
    """Whether no more follow."""


class Draws(LogitsProcessor):  # type: ignore[misc]
    """Draws every row's token by the run's own random numbers, and leaves that token alone."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._rows: dict[int, tuple[Ask, list[int]]] = {}
        self._settings, self._ids = DrawSettings.of((), device), torch.zeros(0, 3, dtype=torch.int64)

    def is_argmax_invariant(self) -> bool:
        """See LogitsProcessor."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See LogitsProcessor."""
        if not process_dict_updates(
            self._rows, batch_update, lambda params, _, sampled: (params.extra_args[_ASK], sampled)
        ):
            return
        asks = [self._rows[index][0] for index in range(len(self._rows))]
        self._settings = DrawSettings.of([ask.sampling for ask in asks], self._device)
        self._ids = torch.tensor([ask.row for ask in asks], dtype=torch.int64, device=self._device)

    def apply(self, logits: Tensor) -> Tensor:
        """See LogitsProcessor; of logits [n, V] one a row is left, a log probability; the rest is -inf."""
        rows = [self._rows[index] for index in range(len(logits))]
        places = [ask.begin + len(sampled) for ask, sampled in rows]
        numbers = uniform(rows[0][0].seed, self._ids, torch.tensor(places, device=self._device))
        drawn = draw(logits, self._settings, numbers)
        for index, (ask, sampled) in enumerate(rows):
            if ask.given:
                token = ask.given[min(len(sampled), len(ask.given) - 1)]
                drawn.tokens[index] = token
                drawn.logprobs[index] = logits[index].log_softmax(-1)[token]
        return logits.fill_(-inf).scatter_(1, drawn.tokens[:, None], drawn.logprobs[:, None])


class Core:
    """vLLM's engine.

    Args:
        directory: has the model's config; weights come by ``reload``.
        device: where it runs.
        dtype: of its weights, as a config says it.
        context: tokens of a row at most.
        max_rows: rows that run at once.
        keep_cache: whether keys and values of other weights are read on.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: torch.device,
        dtype: str,
        context: int,
        max_rows: int,
        keep_cache: bool,
    ) -> None:
        self._keep_cache = keep_cache
        # On a processor vLLM packs matrices, and what it packed of a tied head it would not pack again.
        self._is_asleep, self._can_sleep = False, device.type == "cuda"
        config = EngineArgs(
            model=str(directory),
            dtype=dtype,
            load_format="dummy",
            hf_overrides={"tie_word_embeddings": False} if device.type == "cpu" else {},
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=context,
            max_num_seqs=max_rows,
            enable_prefix_caching=not keep_cache,
            enforce_eager=device.type == "cpu",
            enable_sleep_mode=self._can_sleep,
            async_scheduling=False,
            disable_log_stats=True,
            logprobs_mode="processed_logits",
            logits_processors=[Draws],
        ).create_engine_config()
        self.cache_bytes = _cache_bytes(config, max_rows, device)
        config.cache_config.kv_cache_memory_bytes = self.cache_bytes
        set_threads = torch.set_num_threads
        try:
            self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        finally:
            torch.set_num_threads = set_threads  # vLLM puts another there, for the whole process

    def add(self, name: str, tokens: Sequence[int], ask: Ask, most: int, stop: Sequence[int]) -> None:
        """Let a row run.

        Args:
            name: of the request.
            tokens: those it has.
            ask: how it is continued.
            most: new tokens at most.
            stop: tokens that end it.
        """
        params = SamplingParams(
            temperature=0.0,
            max_tokens=most,
            stop_token_ids=list(stop),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            extra_args={_ASK: ask},
        )
        self._engine.add_request(name, {"prompt_token_ids": list(tokens)}, params)

    def step(self) -> Iterator[Piece]:
        """Go on by a token; what came of it."""
        for output in self._engine.step():
            (found,) = output.outputs
            yield Piece(
                name=output.request_id,
                tokens=list(found.token_ids),
                logprobs=[
                    each[token].logprob for token, each in zip(found.token_ids, found.logprobs, strict=True)
                ],
                has_ended=output.finished,
            )

    def abort(self, name: str) -> None:
        """Take a row out."""
        self._engine.abort_request([name])

    def reload(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take other weights, by the names of files; keys and values of older ones are void, unless kept."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine.set_weight_version(str(version))
        if not self._keep_cache:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def sleep(self) -> None:
        """Give a device's room back; weights wait in host memory."""
        if self._can_sleep and not self._is_asleep:
            self._engine.sleep(level=1)
            self._is_asleep = True

    def wake(self) -> None:
        """Take what ``sleep`` gave back."""
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False


def _cache_bytes(config: VllmConfig, max_rows: int, device: torch.device) -> int:
    """Room for so many rows of the context, in whole blocks; of a device, at most half of what is free."""
    model, parallel = config.model_config, config.parallel_config
    block = config.cache_config.block_size
    tokens = max_rows * -(-model.max_model_len // block) * block
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    wanted = 2 * (tokens + block) * heads * model.get_head_size() * layers * model.dtype.itemsize
    if device.type == "cuda":
        wanted = min(wanted, torch.cuda.mem_get_info(device)[0] // 2)
    return int(wanted)
