"""Peaks: find a rank's peak memory by role and phase, from passes over fake tensors.

    recipe, its longest rows ─ this rank's shard of each model, as fake tensors ─ the run's own Parallel and
    Optimizer over micro-batches ─ count every live storage ─> Peak: bytes by phase and part

A fake tensor has a shape, a dtype and a device but no memory, so models of any size can be tried. The
sampler's memory is computed from shapes. On a mesh a rank has its own layers, sharded by tp. With fsdp, one
unit at a time is gathered: its parameters and its gradients.

Memory of libraries, and freed memory that the C library keeps, come on top.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rillflow.app.encoding import EncodedTask, longest_row
from rillflow.app.memory import SAMPLED_LOGITS, ModelSizes, cache_bytes, rows_a_rank
from rillflow.app.recipe import Recipe
from rillflow.app.role_table import RoleSpec, roles_of
from rillflow.app.sources import critic_source, scorer_sources
from rillflow.errors import ConfigError
from rillflow.formulas.logprobs import token_logprobs
from rillflow.models.architecture import has_plain_head, short_copy
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import LanguageModel, ScalarModel, outline
from rillflow.models.lazy_weights import replace_parameters
from rillflow.models.sampling_shard import sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import completions
from rillflow.records.row import RowId
from rillflow.roles.saving import SMALL_BYTES
from rillflow.rollout.config import VLLM
from rillflow.runs.formatting import size
from rillflow.sharding.experts import expert_weights
from rillflow.sharding.module import Output, Parallel
from rillflow.sharding.pipeline import layers_of
from rillflow.training.config import TrainConfig
from rillflow.training.optimizer import Optimizer
from rillflow.training.recompute import Recompute
from rillflow.training.scorer import micro_batches
from rillflow.workers.config import SAMPLER, MeshSizes

Parts = Mapping[str, int]
"""Bytes by purpose."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak memory of one role on a rank.

    Example:
        Peak(role="policy", pool="main", kept={"weights": 400}, phases={"trains": {"gradients": 400}})
    """

    role: str
    """Name of the role."""
    pool: str
    """Pool of the role."""
    kept: Parts
    """Bytes held from step to step."""
    phases: Mapping[str, Parts]
    """Additional bytes while the role works, by phase."""
    saved: int = 0
    """Bytes of the copies that a checkpoint is written from, while work goes on."""

    @property
    def working(self) -> int:
        """Most additional bytes of a phase."""
        return max((sum(parts.values()) for parts in self.phases.values()), default=0)


def peaks_of(recipe: Recipe, base: Path, encoded: EncodedTask, sizes: ModelSizes) -> list[Peak]:
    """Return the peaks of a recipe's models.

    Args:
        recipe: the checked settings.
        base: its folder.
        encoded: its rows; the longest ones count.
        sizes: the policy's sizes, for keys and values.

    Raises:
        ModelError: a model is missing, or cannot be sharded so.
    """
    (rows, prompts), longest = _longest(recipe, encoded), longest_row(recipe, encoded)
    found = []
    for role, kind in roles_of(recipe).items():
        if kind.is_model or (role == SAMPLER and recipe.placement.samples_apart):
            found.append(_Trial(recipe, base, role, kind, rows, prompts, sizes, longest).peak())
    return found


def rank_bytes(peaks: list[Peak], pool: str) -> int:
    """Return the peak bytes of a rank: all that its roles keep, and the most that one role takes at work."""
    there = [peak for peak in peaks if peak.pool == pool]
    return sum(sum(peak.kept.values()) for peak in there) + max((peak.working for peak in there), default=0)


def saved_bytes(peaks: list[Peak], pool: str) -> int:
    """Return the bytes of the copies that a checkpoint is written from, on a rank of a pool."""
    return sum(peak.saved for peak in peaks if peak.pool == pool)


def peak_lines(peaks: list[Peak]) -> list[str]:
    """Return a line for each pool's rank, each role and each of its phases."""
    lines = []
    for pool in dict.fromkeys(peak.pool for peak in peaks):
        saved = saved_bytes(peaks, pool)
        most = f"at most {size(rank_bytes(peaks, pool))}, and the libraries'"
        more = f"; up to {size(saved)} more while a checkpoint is written" if saved else ""
        lines.append(f"a rank of pool {pool}: {most}{more}")
        for peak in peaks:
            if peak.pool == pool:
                lines.append(f"  {peak.role} keeps {_told(peak.kept)}")
                lines += [f"  {peak.role} {phase}: {_told(parts)}" for phase, parts in peak.phases.items()]
    return lines


def require_room(peaks: list[Peak], ranks: Mapping[str, int], free: int) -> None:
    """Refuse ranks that share a memory and do not fit into it.

    Args:
        peaks: peaks of all roles.
        ranks: number of each pool's ranks in that memory.
        free: bytes that are free in it.

    Raises:
        ConfigError: they do not fit; the error names the largest phase and a fix.
    """
    needed = {
        pool: count * (rank_bytes(peaks, pool) + saved_bytes(peaks, pool)) for pool, count in ranks.items()
    }
    if sum(needed.values()) <= free:
        return
    pool = max(needed, key=lambda name: needed[name])
    there = [peak for peak in peaks if peak.pool == pool]
    most = max(there, key=lambda peak: peak.working)
    phase = max(most.phases, key=lambda name: sum(most.phases[name].values()))
    kept = sum(sum(peak.kept.values()) + peak.saved for peak in there)
    every = " + ".join(f"{ranks[name]} of pool {name} {size(needed[name])}" for name in ranks)
    raise ConfigError(
        f"the ranks hold {size(sum(needed.values()))} at most, and {size(free)} are free",
        why=f"{every}; a rank of pool {pool} keeps {size(kept)}, and {_told(most.phases[phase])} while the "
        f"{most.role} {phase}",
        fix=_FIXES["kept" if kept > most.working else phase],
    )


_FIXES = {
    "kept": "cut the model over more ranks (fsdp, ep, tp or pp in placement.train_parallel), choose a "
    "smaller one, or lower rollout.max_rows where vLLM is the engine",
    "trains": "lower policy.tokens_per_micro_batch, set policy.gradient_checkpointing = true, or cut the "
    "model over more ranks",
    "scores": "lower policy.tokens_per_micro_batch, or cut the model over more ranks",
    "answers": "lower rollout.max_rows, or share the model over more ranks in placement.rollout_parallel",
}
"""Fixes, by what takes the most memory."""


class _Trial:
    """One role's model on one rank, run on fake tensors."""

    def __init__(
        self,
        recipe: Recipe,
        base: Path,
        role: str,
        kind: RoleSpec,
        rows: Batch,
        prompts: Batch,
        sampled: ModelSizes,
        longest: int,
    ) -> None:
        self._recipe, self._role, self._kind = recipe, role, kind
        self._rows, self._prompts, self._sampled = rows, prompts, sampled
        self._longest = longest
        self._sizes = MeshSizes() if role == SAMPLER else recipe.placement.mesh_of(role)
        config, scalar = _model(recipe, base, role, kind)
        made: type[Any] = ScalarModel if scalar else LanguageModel
        where: dict[str, Any] = {"device": torch.device("cpu"), "base": base, "section": f"{role}.model"}
        self._outline = partial(outline, made, config, seed=0, **where)
        alone = self._sizes.tp == 1 and not scalar
        self._has_plain_head = alone and has_plain_head(short_copy(self._outline().module))
        self._back = 1 if not scalar or kind.section == "critic" else 0
        self._scalar = scalar

    def peak(self) -> Peak:
        """Return the role's peak memory."""
        made = partial(Peak, role=self._role, pool=self._recipe.placement.pool_of(self._role))
        if self._role == SAMPLER:
            copied, taken = self._copied()
            return made(kept=copied, phases={"answers": self._answering(0) | taken})
        train = self._recipe.policy.as_train()
        with _Live() as live:
            module, passes = self._module(live), self._in_flight()
            share = self._share_of(module)
            weights, parallel = live.bytes, self._parallel(module)
            kept, phases = {"weights": int(weights * share)}, dict[str, dict[str, int]]()
            gathered = 2 * self._unit(module) if self._sizes.fsdp > 1 else 0
            part = self._rows.select(micro_batches(self._rows, train.tokens_per_micro_batch)[0])
            if self._kind.is_trained:
                optimizer = Optimizer(module, train, total_steps=1, gradients=parallel.gradients)
                masters = live.bytes - weights
                numbers = sum(master.numel() for master in optimizer.masters.values())
                moments = 2 * numbers * (2 if train.optimizer_dtype == "bfloat16" else 4)
                kept["optimiser"] = int((masters + moments) * share)
                before = live.begin()
                self._train(parallel, optimizer, train, part)
                gradients = live.bytes - before
                activations = (live.most - before - gradients) * passes
                phases["trains"] = {
                    "gradients": int(gradients * share),
                    "activations": activations,
                    "gathered": gathered,
                }
                optimizer.discard()
            before = live.begin()
            parallel.run([part], self._back, self._finish)
            phases["scores"] = {"activations": live.most - before, "gathered": gathered // 2}
        learned = sum(weight.nbytes for weight in module.parameters() if weight.requires_grad)
        if self._role == "reference" and self._recipe.shares_reference:
            return made(kept={"adapter": int(learned * share)}, phases=phases)
        if self._role == "policy" and self._recipe.has_policy and not self._recipe.placement.samples_apart:
            copied, taken = self._copied()
            kept, phases["answers"] = kept | copied, self._answering(int(weights * share)) | taken
        held = int(learned * share) + kept.get("optimiser", 0)
        is_far = "optimizer" if self._kind.is_trained else "reference"
        if self._recipe.run.device.startswith("cuda") and self._recipe.policy.offload in ("all", is_far):
            if self._kind.is_trained:
                kept["optimiser"] = 0  # one parameter's state is loaded at a time
            else:
                phases["scores"] = {**phases["scores"], "weights": kept.pop("weights")}
        saved = held if self._kind.is_trained and held > SMALL_BYTES else 0
        return made(kept=kept, phases=phases, saved=saved)

    def _answering(self, held: int) -> dict[str, int]:
        """Return the sampler's bytes on one rank, without the weights that it shares with the trainer."""
        tp, rows = self._recipe.placement.generate_tp, rows_a_rank(self._recipe)
        model, sizes = self._outline(), self._sampled
        is_copied = self._recipe.rollout.engine == VLLM
        with _Live() as live:
            module = _cut(model.module, tp, live)
            weights, before = live.bytes, live.begin()
            part = self._prompts.select(list(range(min(len(self._prompts), rows))))
            self._parallel(module).run([part], self._back, self._finish)
            prefill = live.most - before
        is_shared = self._role != SAMPLER and self._sizes.is_plain  # the module is the trainer's own
        return {
            "weights that cross": 0 if is_shared else max(0, weights - held),
            "KV cache": 0 if is_copied else cache_bytes(self._recipe, sizes, self._longest),
            "prompts": prefill,
            "logits": SAMPLED_LOGITS * rows * sizes.vocabulary * 4,
        }

    def _copied(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return vLLM's bytes: those kept from step to step, and those on a device while it answers."""
        rollout, is_far = self._recipe.rollout, self._recipe.run.device.startswith("cuda")
        if rollout.engine != VLLM:
            return {}, {}
        module: Any = self._outline().module
        head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
        weights = sum(weight.numel() for weight in module.parameters()) * module.dtype.itemsize
        weights += 0 if is_far or head is not embedding else head.nbytes  # vLLM does not tie them on a CPU
        cache = cache_bytes(self._recipe, self._sampled, self._longest)
        found = {"vLLM's weights": weights, "vLLM's KV cache": cache}
        return ({}, found) if is_far else (found, {})

    def _module(self, live: _Live) -> nn.Module:
        """Return this rank's part of the model as fake tensors: its layers, sharded by tp."""
        module: Any = self._outline().module
        if self._sizes.pp > 1:
            config = module.config.get_text_config()
            layers = next(
                part
                for part in module.base_model.children()
                if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers
            )
            own = layers_of(0, self._sizes.pp, len(layers))
            del layers[len(own) :]
            config.num_hidden_layers = len(own)
        return _cut(module, self._sizes.tp, live)

    def _parallel(self, module: nn.Module) -> Parallel:
        """Return the module's runner; set ``is_plain``, which fake tensors cannot determine."""
        found = Parallel.whole(module)
        found.part.is_plain = self._has_plain_head
        return found

    def _share_of(self, module: nn.Module) -> float:
        """Return the share of the parameters that one rank of fsdp or ep holds."""
        inside, every = expert_weights(module), dict(module.named_parameters())
        experts = sum(every[name].numel() for name in inside) / sum(each.numel() for each in every.values())
        return (1 - experts + experts / self._sizes.ep) / self._sizes.fsdp

    def _unit(self, module: nn.Module) -> int:
        """Return the bytes that fsdp gathers at once: one layer, and everything outside the layers."""
        every = sum(weight.nbytes for weight in module.parameters())
        lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part)]
        layers = max(lists, key=len)
        inside = sum(weight.nbytes for weight in layers.parameters())
        return every - inside + inside // len(layers)

    def _in_flight(self) -> int:
        """Return the micro-batches whose activations the first pipeline stage keeps at once."""
        budget = self._recipe.policy.tokens_per_micro_batch
        tokens = self._recipe.algorithm.rows_per_step * int(self._rows.ragged("tokens").lengths.max())
        parts = -(-tokens // (budget * self._sizes.dp))
        return max(1, min(self._sizes.pp, parts))

    def _finish(self, part: Batch, output: Output) -> Tensor:
        if self._scalar:
            return output.sum()
        return token_logprobs(output, completions(part).values, 1.0).logprobs.sum()

    def _train(self, parallel: Parallel, optimizer: Optimizer, train: TrainConfig, part: Batch) -> None:
        """Run two micro-batches, because the second one's gradients coexist with the first one's."""
        again = Recompute(parallel.module, whole=False) if train.gradient_checkpointing else nullcontext()
        with again:
            for _ in range(2):
                parallel.run([part], self._back, self._finish, optimizer.collect)


class _Others:
    """Stand-in for absent ranks, which all hold the same as this one."""

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.size = ranks

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """See Ranks."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See Ranks."""
        return [tensor.clone() for _ in range(self.size)]

    def stack(self, tensor: Tensor) -> Tensor:
        """See Ranks."""
        return torch.stack(self.gather(tensor))

    def part(self, groups: Sequence[Sequence[int]]) -> _Others:
        """See Ranks."""
        return _Others(len(groups[0]))


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of all live fake tensors' storages.

    Weights, and everything computed from them, are fake; rows and their positions are real.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        """Mode that makes fake tensors."""
        self.bytes = self.most = 0
        """Current bytes, and the peak since ``begin``."""
        self._seen: set[int] = set()

    def begin(self) -> int:
        """Reset the peak, and return the current bytes."""
        self.most = self.bytes
        return self.bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count new storages."""
        found = function(*args, **(kwargs or {}))
        for one in tree_iter(found):
            if isinstance(one, FakeTensor) and one.untyped_storage()._cdata not in self._seen:
                storage = one.untyped_storage()
                self._seen.add(storage._cdata)
                self.bytes += storage.nbytes()
                self.most = max(self.most, self.bytes)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return found

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size


def _cut(module: Any, tp: int, live: _Live) -> nn.Module:
    """Return a rank's part of a module, with fake weights; a frozen base stays frozen."""
    learns = {name for name, weight in module.named_parameters() if weight.requires_grad}
    local: nn.Module = sampling_module(module, tensor_plan(module), _Others(tp)) if tp > 1 else module
    with live.fake:
        replace_parameters(local, lambda weight: torch.empty(weight.shape, dtype=weight.dtype))
    for name, weight in local.named_parameters():
        weight.requires_grad_(name in learns)
    return local


def _model(recipe: Recipe, base: Path, role: str, kind: RoleSpec) -> tuple[ModelConfig, bool]:
    """Return a role's model config, and whether it has a scalar head."""
    scorers = scorer_sources(recipe, base)
    named = {"reward": scorers.get("reward.model"), "cost": scorers.get("cost.model")}
    named["critic"] = critic_source(recipe, base)
    source, model = ({kind.section: None} | named)[kind.section], recipe.policy.model
    is_scalar = kind.section in named or role == "reward_model"
    return ModelConfig(path=source, dtype=model.dtype) if source else model, is_scalar


def _longest(recipe: Recipe, encoded: EncodedTask) -> tuple[Batch, Batch]:
    """Return the longest rows, enough for a micro-batch, and the prompts with one token to predict."""
    data = recipe.chosen.data
    known = [row for row in encoded.train[data] if row is not None]
    known.sort(key=lambda row: row.length(data, recipe.rollout.max_tokens), reverse=True)
    samples = recipe.algorithm.rows_per_step // recipe.algorithm.prompts_per_step
    rows: list[tuple[list[int], int, RowId]] = []
    size, budget = 0, recipe.policy.tokens_per_micro_batch
    for number, row in enumerate(known[: recipe.algorithm.prompts_per_step]):
        sampled = [array("i", [number % 2, *[0] * (recipe.rollout.max_tokens - 1)])] * samples
        for place, answer in enumerate(row.answers if data.answers else sampled):
            text = [*row.prompt, *answer]
            if place and not data.answers:
                text[len(row.prompt)] = place  # samples share their prompt and nothing else
            rows.append((text, len(row.prompt), RowId(0, number, place)))
            size += len(text)
        if size > budget:
            break
    prompts = [(list(row.prompt), len(row.prompt) - 1) for row in known[: recipe.algorithm.prompts_per_step]]
    return (
        _batch([(text, begin) for text, begin, _ in rows], [row for _, _, row in rows]),
        _batch(prompts, [RowId(0, number, 0) for number in range(len(prompts))]),
    )


def _batch(texts: Sequence[tuple[list[int], int]], ids: Sequence[RowId]) -> Batch:
    """Return rows whose loss mask starts at the given token."""
    masks = [[place >= begin for place in range(len(text))] for text, begin in texts]
    fields = {
        "tokens": Ragged.from_rows([text for text, _ in texts]),
        "loss_mask": Ragged.from_rows(masks, torch.bool),
    }
    return Batch(ids=row_ids(ids), fields=fields)


def _told(parts: Parts) -> str:
    return " + ".join(f"{name} {size(amount)}" for name, amount in parts.items() if amount) or size(0)
