"""SharedBase: one frozen base model, and the adapters of many clients on it, one at a time.

    base: weights once in memory ─┬─ no adapter
                                  ├─ slot of shape (rank 8, all layers)      one set of adapter modules
                                  └─ slot of shape (rank 32, with lm_head)   for each shape
    enter(shape, key, weights): the slot's modules are joined to the layers, and the weights copied into them

A client's tensors are its own; a slot holds a copy of those that run. So the parameters that an engine has
recorded stay the same objects, whoever's weights are in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.errors import DataError
from rillflow.models.adapters import ADAPTER, AdaptedLinear, Adapter, adapted, attach, is_adapter, join
from rillflow.models.architecture import has_plain_head, vocabulary_of
from rillflow.models.config import AdapterConfig
from rillflow.models.language_model import LanguageModel
from rillflow.models.peft_settings import MOST_RANK

ALPHA = 32.0
"""Scale of every adapter, as in Tinker: alpha / rank multiplies its output."""
LEAST_ROOM = 2**24
"""Parameters that an adapter may have on any base: 64 MiB in float32."""
_ATTENTION = ("attn", "attention")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape that adapters of several clients share."""

    rank: int
    """Rank of the adapters."""
    attention: bool = True
    """Whether the linear layers of attention are adapted."""
    mlp: bool = True
    """Whether the other linear layers of the body are adapted."""
    unembed: bool = True
    """Whether the head is adapted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Joint:
    """An adapter and its layer."""

    owner: nn.Module
    """Module that has the layer."""
    name: str
    """Name of the adapter in its owner."""
    linear: nn.Linear
    """The layer."""
    adapter: Adapter
    """The adapter."""


@dataclass(kw_only=True, eq=False)
class _Slot:
    """The adapter modules of one shape."""

    config: AdapterConfig
    """Size of the adapters, and the layers that they adapt."""
    joints: list[_Joint]
    """Adapters and layers."""
    parameters: dict[str, nn.Parameter]
    """The adapters' parameters, by name in the module."""
    held: object = None
    """Key of the weights that are in the parameters."""


class SharedBase:
    """The base model.

    Args:
        model: a loaded model without an adapter.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.module = model, model.module
        self.device = next(self.module.parameters()).device
        self.vocabulary = vocabulary_of(self.module)
        self.is_plain = has_plain_head(self.module)
        """Whether logits are just the product of last hidden states and the head's weight."""
        size = sum(each.numel() for each in self.module.parameters())
        self.room = max(size, LEAST_ROOM)
        """Most parameters of an adapter: those of the base. All adapters have at most twice as many."""
        self._slots: dict[Shape, _Slot] = {}
        self._inside: _Slot | None = None
        self._versions = count(1)
        self.module.requires_grad_(False)

    @property
    def head(self) -> Any:
        """The head, adapted or not."""
        return self.module.get_output_embeddings()

    def config(self, shape: Shape) -> AdapterConfig:
        """Return the adapters' settings.

        Raises:
            DataError: the rank is out of range, or no layer is adapted.
        """
        if not 1 <= shape.rank <= MOST_RANK:
            raise DataError(f"lora_config.rank is {shape.rank}", why=f"a rank is from 1 to {MOST_RANK:,}")
        targets = self._targets(shape)
        if (size := self.adapter_size(shape.rank, targets)) > self.room:
            raise DataError(
                f"lora_config.rank is {shape.rank}",
                why=f"the adapter would have {size:,} parameters, and the limit is {self.room:,}",
                fix="choose a smaller rank, or fewer layers",
            )
        return AdapterConfig(rank=shape.rank, alpha=ALPHA, targets=targets)

    def adapter_size(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the parameters of an adapter; without targets it adapts every layer of the body."""
        linears = [
            part
            for name, part in self.module.named_modules()
            if isinstance(part, nn.Linear) and ADAPTER not in name
            if (part is not self.head if not targets else name.rpartition(".")[2] in targets)
        ]
        return rank * sum(each.in_features + each.out_features for each in linears)

    def _targets(self, shape: Shape) -> tuple[str, ...]:
        """Return the names of the adapted layers; empty for every linear layer of the body."""
        if shape.attention and shape.mlp and not shape.unembed:
            return ()
        head, chosen = self.head, set[str]()
        for name, part in self.module.named_modules():
            if not isinstance(part, nn.Linear) or ADAPTER in name:
                continue
            is_attention = any(each in name for each in _ATTENTION)
            if shape.unembed if part is head else (shape.attention if is_attention else shape.mlp):
                chosen.add(name.rpartition(".")[2])
        if not chosen:
            raise DataError(
                "lora_config adapts no layer",
                why="train_attn, train_mlp and train_unembed leave nothing that this model has",
                fix="set one of them to true",
            )
        return tuple(sorted(chosen))

    def new_version(self) -> int:
        """Return a number that no weights on this base have had, for the key of ``enter``.

        Every change of a client's weights takes a new one, also in a model with the name of an earlier one.
        """
        return next(self._versions)

    def names(self, shape: Shape) -> dict[str, torch.Size]:
        """Return the shapes of the adapters' parameters, by name."""
        return {name: each.shape for name, each in self._slot(shape).parameters.items()}

    def enter(
        self, shape: Shape | None, key: object, weights: Mapping[str, Tensor]
    ) -> dict[str, nn.Parameter]:
        """Run with these adapters from now on; return the parameters that hold them.

        Args:
            shape: shape of the adapters; None for the base alone.
            key: equal keys stand for equal weights, which are not copied again; see ``new_version``.
            weights: the adapters' weights by name.
        """
        slot = None if shape is None else self._slot(shape)
        self._join(slot)
        if slot is None:
            return {}
        if slot.held != key:
            slot.held = None
            with torch.no_grad():
                for name, parameter in slot.parameters.items():
                    parameter.copy_(weights[name])
            slot.held = key
        return slot.parameters

    def _slot(self, shape: Shape) -> _Slot:
        if shape not in self._slots:
            config = self.config(shape)
            self._join(None)
            attach(self.module, config)
            joints = [self._joint(name, linear) for name, linear in adapted(self.module).items()]
            for joint in joints:
                joint.adapter.to_empty(device=self.device)
            found = {name: each for name, each in self.module.named_parameters() if is_adapter(name)}
            self._inside = self._slots[shape] = _Slot(config=config, joints=joints, parameters=found)
        return self._slots[shape]

    def _joint(self, name: str, linear: AdaptedLinear) -> _Joint:
        owner, _, last = name.rpartition(".")
        return _Joint(
            owner=self.module.get_submodule(owner),
            name=f"{last}{ADAPTER}",
            linear=linear,
            adapter=linear.beside[0],
        )

    def _join(self, slot: _Slot | None) -> None:
        """Exchange the adapters that are joined to the layers."""
        if slot is self._inside:
            return
        for joint in self._inside.joints if self._inside is not None else ():
            del joint.linear.beside
            joint.linear.__class__ = nn.Linear
            delattr(joint.owner, joint.name)
        for joint in slot.joints if slot is not None else ():
            joint.owner.register_module(joint.name, joint.adapter)
            join(joint.linear, joint.adapter)
        self._inside = slot
