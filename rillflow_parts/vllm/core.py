"""Core: vLLM's engine; the only module that imports vLLM.

    Ask ─ add ─> LLMEngine ─ step: model ─ logits [n, V] ─ Draws ─ one token per row remains ─> Piece
                    ^                                        └─ uniform(seed, row id, position), as in the
    reload: (name, weight), drops older keys and values         native engine
    adapt:  the adapter of a version, a LoRA request of its name; the base is reloaded once

vLLM's own sampler takes the likeliest token. ``Draws`` leaves only the drawn one, with its log probability in
place of the logit.

Legend: n rows, V vocabulary.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from rillflow.formulas.counter import uniform
from rillflow.records.row import RowId
from rillflow.rollout.native.sampling import DrawSettings, Seen, draw
from rillflow_parts.vllm.requests import Ask, CoreSettings, Piece, unname_memory

_ASK, _HEAD = "rillflow", "lm_head.weight"
_NOTHING = Piece(row=RowId(0, 0, 0), tokens=(), logprobs=(), has_ended=False)


class Draws(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that draws tokens with the run's own random numbers, and masks all others."""

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
        """See LogitsProcessor; keep one log probability per row of logits [n, V]; set the rest to -inf."""
        rows = [self._rows[index] for index in range(len(logits))]
        places = [ask.begin + len(sampled) for ask, sampled in rows]
        numbers = uniform(rows[0][0].seed, self._ids, torch.tensor(places, device=self._device))
        drawn = draw(logits, self._settings, numbers, self._seen(rows, logits.shape[1]))
        for index, (ask, sampled) in enumerate(rows):
            if ask.given:
                token = ask.given[min(len(sampled), len(ask.given) - 1)]
                drawn.tokens[index] = token
                drawn.logprobs[index] = logits[index].log_softmax(-1)[token]
        return logits.fill_(-inf).scatter_(1, drawn.tokens[:, None], drawn.logprobs[:, None])

    def _seen(self, rows: Sequence[tuple[Ask, list[int]]], vocabulary: int) -> Tensor | None:
        """Return [2, g, V] token counts of rows with a penalty; recomputed, because vLLM may preempt rows."""
        seen, penalised = Seen(vocabulary, self._device), [rows[index] for index in self._settings.penalised]
        for ask, sampled in penalised:
            seen.begin(ask.row, (*ask.tokens, *sampled), (*ask.sampled, *sampled))
        return seen.of([ask.row for ask, _ in penalised]) if penalised else None


class Core:
    """vLLM's engine.

    Args:
        settings: start settings.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self._keep_cache, self._rank, self._scratch = settings.keep_cache, settings.rank, settings.scratch
        device = torch.device(settings.device)
        # On a CPU, vLLM packs weight matrices, and would not pack a tied head again after a reload.
        self._is_asleep, self._can_sleep = False, device.type == "cuda"
        self._adapter: LoRARequest | None = None
        config = EngineArgs(
            model=settings.directory,
            dtype=settings.dtype,
            load_format="dummy",
            hf_overrides={"tie_word_embeddings": False} if device.type == "cpu" else {},
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=settings.context,
            max_num_seqs=settings.max_rows,
            enable_prefix_caching=not settings.keep_cache,
            enforce_eager=device.type == "cpu",
            enable_sleep_mode=self._can_sleep,
            async_scheduling=False,
            disable_log_stats=True,
            logprobs_mode="processed_logits",
            logits_processors=[Draws],
            **_room_for(settings.rank),
            **_shared_with(settings),
        ).create_engine_config()
        self.cache_bytes = _cache_bytes(config, settings.max_rows, device)
        if settings.cache_gib is not None:
            self.cache_bytes = min(self.cache_bytes, int(settings.cache_gib * 2**30))
        config.cache_config.kv_cache_memory_bytes = self.cache_bytes
        set_threads = torch.set_num_threads
        try:
            self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        finally:
            torch.set_num_threads = set_threads  # vLLM replaces the function for the whole process
        if settings.tp > 1 and device.type == "cpu":
            unname_memory(settings.port)
        (model,) = self._engine.collective_rpc("get_model")
        named = model.named_parameters(remove_duplicate=False)
        self._has_head = any(name.endswith(_HEAD) for name, _ in named)  # gemma2 has no head of its own

    def add(self, tokens: Sequence[int], ask: Ask) -> None:
        """See AnyCore."""
        if ask.sampling.is_penalised:
            ask = replace(ask, tokens=tuple(tokens))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=ask.most,
            stop_token_ids=list(ask.stop),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            extra_args={_ASK: ask},
        )
        prompt = {"prompt_token_ids": list(tokens)}
        self._engine.add_request(_named(ask.row), prompt, params, lora_request=self._adapter)

    def step(self, most: int) -> list[Piece]:
        """See AnyCore."""
        found = dict[str, Piece]()
        for _ in range(most):
            for output in self._engine.step():
                (new,), name = output.outputs, output.request_id
                drawn = zip(new.token_ids, new.logprobs, strict=True)
                before = found.get(name, _NOTHING)
                found[name] = Piece(
                    row=RowId(*map(int, name.split("/"))),
                    tokens=[*before.tokens, *new.token_ids],
                    logprobs=[*before.logprobs, *(each[token].logprob for token, each in drawn)],
                    has_ended=output.finished,
                )
            if not self._engine.has_unfinished_requests():
                break
        return list(found.values())

    def abort(self, row: RowId) -> None:
        """See AnyCore."""
        self._engine.abort_request([_named(row)])

    def reload(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> None:
        """See AnyCore."""
        known = ((name, each) for name, each in weights if self._has_head or name != _HEAD)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": known})
        self._turned(version)

    def adapt(self, version: int, scale: float, weights: Iterator[tuple[str, Tensor]]) -> None:
        """See AnyCore; running rows name the adapter by number, so the new one replaces the old in place."""
        held = {name: tensor.contiguous() for name, tensor in weights}
        layers = {name.rsplit(".", 3)[-3] for name in held}
        said = {"r": self._rank, "lora_alpha": scale * self._rank, "target_modules": sorted(layers)}
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            save_file(held, Path(folder) / "adapter_model.safetensors")
            (Path(folder) / "adapter_config.json").write_text(json.dumps(said))
            named = {"lora_name": f"version {version}", "lora_int_id": 1, "lora_path": folder}
            self._engine.add_lora(LoRARequest(**named, load_inplace=True))
        self._adapter = LoRARequest(**named)
        self._turned(version)

    def _turned(self, version: int) -> None:
        self._engine.set_weight_version(str(version))
        if not self._keep_cache:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def sleep(self) -> None:
        """See AnyCore."""
        if self._can_sleep and not self._is_asleep:
            self._engine.sleep(level=1)
            self._is_asleep = True

    def wake(self) -> None:
        """See AnyCore."""
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False


def _named(row: RowId) -> str:
    """Return the name of a row's vLLM request."""
    return "/".join(map(str, row))


def _shared_with(settings: CoreSettings) -> dict[str, Any]:
    """Return the settings of the place where an engine's workers meet.

    Each engine has one worker. Engines with shards of the same weights schedule the same requests, each by
    itself. An engine that is alone meets nobody, in memory without a name: vLLM's file would outlive a kill.
    """
    if settings.tp == 1:
        memory = f"file:///proc/{os.getpid()}/fd/{os.memfd_create('vllm')}"

        class Alone(UniProcExecutor):  # type: ignore[misc]
            def _distributed_args(self) -> tuple[str, int, int]:
                return (memory, *super()._distributed_args()[1:])

        return {"distributed_executor_backend": Alone}
    meeting = f"tcp://127.0.0.1:{settings.port}"  # on a CPU, vLLM names its shared memory by the port

    class OneOfSeveral(ExecutorWithExternalLauncher):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            return meeting, settings.tp_rank, 0  # the rank sees one device

    return {
        "tensor_parallel_size": settings.tp,
        "distributed_executor_backend": OneOfSeveral,
        "disable_custom_all_reduce": True,  # which needs the other ranks' devices
    }


def _room_for(rank: int) -> dict[str, Any]:
    """Return the settings that reserve memory for one adapter: vLLM's smallest maximum rank that fits.

    Raises:
        ValueError: the rank exceeds vLLM's largest.
    """
    if not rank:
        return {}
    ranks = [each for each in get_args(MaxLoRARanks) if each >= rank]
    if not ranks:
        raise ValueError(f"the adapter's rank is {rank}; vLLM's maximum is {max(get_args(MaxLoRARanks))}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks)}


def _cache_bytes(config: VllmConfig, max_rows: int, device: torch.device) -> int:
    """Return the bytes for ``max_rows`` whole contexts; on a GPU, at most half of the free memory."""
    model, parallel = config.model_config, config.parallel_config
    block = config.cache_config.block_size
    tokens = max_rows * -(-model.max_model_len // block) * block
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    wanted = 2 * (tokens + block) * heads * model.get_head_size() * layers * model.dtype.itemsize
    if device.type == "cuda":
        wanted = min(wanted, torch.cuda.mem_get_info(device)[0] // 2)
    return int(wanted)
