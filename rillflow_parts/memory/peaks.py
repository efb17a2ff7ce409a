"""Peaks: find a rank's peak memory by role and phase, from passes over fake tensors.

    facts, the longest rows ─ this rank's shard of each model, as fake tensors ─ the run's own Parallel and
    Optimizer over micro-batches ─ count every live storage ─> Peak: bytes by phase and part

A fake tensor has a shape, a dtype and a device but no memory, so models of any size can be tried. Formulas of
``memory.py`` give the optimiser's state, the KV cache and the logits. On a mesh a rank has its own layers,
sharded by tp. With fsdp, one unit at a time is gathered: its parameters and its gradients.

Memory of libraries, and freed memory that the C library keeps, are not included.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rillflow.app.encoding import EncodedTask
from rillflow.app.facts import RecipeFacts
from rillflow.app.memory import Peak, answering, optimiser_bytes, rows_a_rank
from rillflow.app.role_table import RoleSpec
from rillflow.app.sections import Recipe
from rillflow.formulas.logprobs import token_logprobs
from rillflow.models.architecture import has_plain_head, short_copy
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import LanguageModel, ScalarModel, outline
from rillflow.models.lazy_weights import replace_parameters
from rillflow.models.sampling_shard import sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.records.batch import Batch
from rillflow.records.rollout import completions
from rillflow.roles.saving import SMALL_BYTES
from rillflow.sharding.experts import expert_weights
from rillflow.sharding.module import Output, Parallel
from rillflow.sharding.pipeline import layers_of
from rillflow.tasks.encoded import Encoded
from rillflow.tasks.prompts import answered_batch
from rillflow.training.config import TrainConfig
from rillflow.training.optimizer import Optimizer
from rillflow.training.recompute import Recompute
from rillflow.training.scorer import micro_batches
from rillflow.workers.collectives import SingleRank
from rillflow.workers.config import SAMPLER, MeshSizes


def peaks_of(facts: RecipeFacts) -> list[Peak]:
    """Return the peaks of a recipe's models; empty if row lengths are unknown.

    Raises:
        ModelError: a model is missing, or cannot be sharded this way.
    """
    if facts.encoded is None or facts.sizes is None or facts.longest is None:
        return []
    sampler = answering(facts.resolved, facts.sizes, facts.longest)
    rows, prompts = _longest(facts.recipe, facts.encoded)
    found = []
    for role, kind in facts.resolved.roles.items():
        if kind.is_model:
            found.append(_Trial(facts, role, kind, rows, prompts, sampler).peak())
        elif role == SAMPLER and facts.recipe.placement.samples_apart:
            answers = _Trial(facts, role, kind, rows, prompts, sampler).answers(0)
            found.append(replace(sampler, phases={"answers": answers}))
    return found


class _Trial:
    """One role's model on one rank, run on fake tensors."""

    def __init__(
        self, facts: RecipeFacts, role: str, kind: RoleSpec, rows: Batch, prompts: Batch, sampler: Peak
    ) -> None:
        self._resolved, self._recipe, self._role, self._kind = facts.resolved, facts.recipe, role, kind
        self._rows, self._prompts, self._sampler = rows, prompts, sampler
        self._sizes = MeshSizes() if role == SAMPLER else facts.recipe.placement.mesh_of(role)
        config, self._scalar = _model(facts, role, kind)
        made: type[Any] = ScalarModel if self._scalar else LanguageModel
        where: dict[str, Any] = {
            "device": torch.device("cpu"),
            "base": facts.base,
            "section": f"{role}.model",
        }
        self._outline = partial(outline, made, config, seed=0, **where)
        self._has_plain_head = self._sizes.tp == 1 and has_plain_head(short_copy(self._outline().module))
        self._back = 1 if not self._scalar or kind.section == "critic" else 0

    def peak(self) -> Peak:
        """Return the role's peak memory."""
        recipe, is_trained = self._recipe, self._kind.is_trained
        train, phases = recipe.policy.as_train(), dict[str, Mapping[str, int]]()
        with _Live() as live:
            module = self._module(live)
            share, weights, parallel = self._share_of(module), live.bytes, self._parallel(module)
            gathered = 2 * self._unit(module) if self._sizes.fsdp > 1 else 0
            part = self._rows.select(micro_batches(self._rows, train.tokens_per_micro_batch)[0])
            if is_trained:
                optimizer = Optimizer(module, train, total_steps=1, gradients=parallel.gradients)
                before = live.begin()
                self._train(parallel, optimizer, train, part)
                gradients = live.bytes - before
                phases["trains"] = {
                    "gradients": int(gradients * share),
                    "activations": (live.most - before - gradients) * self._in_flight(),
                    "gathered": gathered,
                }
                optimizer.discard()
            before = live.begin()
            parallel.run([part], self._back, self._finish)
            phases["scores"] = {"activations": live.most - before, "gathered": gathered // 2}
        learned = [weight for weight in module.parameters() if weight.requires_grad]
        held = int(sum(weight.nbytes for weight in learned) * share)
        made = partial(Peak, role=self._role, pool=recipe.placement.pool_of(self._role))
        if self._role == "reference" and self._resolved.shares_reference:
            return made(kept={"adapter": held}, phases=phases)
        kept = {"weights": int(weights * share)}
        if is_trained:
            numbers = sum(weight.numel() for weight in learned)
            kept["optimiser"] = int(optimiser_bytes(recipe, numbers) * share)
            held += kept["optimiser"]
        if self._role == "policy" and self._resolved.has_policy and not recipe.placement.samples_apart:
            kept |= self._sampler.kept
            phases["answers"] = self.answers(int(weights * share))
        is_far = "optimizer" if is_trained else "reference"
        if recipe.run.device.startswith("cuda") and recipe.policy.offload in ("all", is_far):
            if is_trained:
                kept["optimiser"] = 0  # one parameter's state is loaded at a time
            else:
                phases["scores"] = {**phases["scores"], "weights": kept.pop("weights")}
        saved = held if is_trained and held > SMALL_BYTES else 0
        return made(kept=kept, phases=phases, saved=saved)

    def answers(self, held: int) -> Mapping[str, int]:
        """Return the sampler's bytes on one rank that holds ``held`` bytes of weights already."""
        rows, model = rows_a_rank(self._recipe), self._outline()
        with _Live() as live:
            module = _cut(model.module, self._recipe.placement.generate_tp, live)
            weights, before = live.bytes, live.begin()
            part = self._prompts.select(list(range(min(len(self._prompts), rows))))
            self._parallel(module).run([part], self._back, self._finish)
            prefill = live.most - before
        is_shared = self._role != SAMPLER and self._sizes.is_plain  # the module is the trainer's own
        crossing = 0 if is_shared else max(0, weights - held)
        return {**self._sampler.phases["answers"], "weights that cross": crossing, "prompts": prefill}

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


class _Others(SingleRank):
    """Stand-in for absent ranks, which all hold the same data as this one."""

    def __init__(self, ranks: int) -> None:
        self.size = ranks

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See Ranks."""
        return [tensor.clone() for _ in range(self.size)]

    def stack(self, tensor: Tensor) -> Tensor:
        """See Ranks."""
        return torch.stack(self.gather(tensor))


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


def _model(facts: RecipeFacts, role: str, kind: RoleSpec) -> tuple[ModelConfig, bool]:
    """Return a role's model config, and whether it has a scalar head."""
    source, model = facts.named.get(kind.section), facts.model
    is_judge = kind.section == "reward" and "reward.judge.model" in facts.scorers
    is_scalar = (kind.section in ("reward", "cost", "critic") and not is_judge) or role == "reward_model"
    return ModelConfig(path=source, dtype=model.dtype) if source else model, is_scalar


def _longest(recipe: Recipe, encoded: EncodedTask) -> tuple[Batch, Batch]:
    """Return the longest rows, enough for a micro-batch, and the prompts with one token to predict."""
    data, limit, prompts = recipe.chosen.data, recipe.rollout.max_tokens, recipe.algorithm.prompts_per_step
    known = [row for row in encoded.train[data] if row is not None]
    known.sort(key=lambda row: row.length(data, limit), reverse=True)
    rows, tokens = list[Encoded](), 0
    for number, row in enumerate(known[:prompts]):
        answers = row.answers
        if not data.answers:  # samples share only their prompt
            samples = range(recipe.algorithm.rows_per_step // prompts)
            answers = tuple(array("i", [place or number % 2, *[0] * (limit - 1)]) for place in samples)
        rows.append(replace(row, answers=answers))
        tokens += sum(len(row.prompt) + len(answer) for answer in answers)
        if tokens > recipe.policy.tokens_per_micro_batch:
            break
    asked = [replace(row, prompt=row.prompt[:-1], answers=(row.prompt[-1:],)) for row in known[:prompts]]
    return answered_batch(rows, epoch=0), answered_batch(asked, epoch=0)
