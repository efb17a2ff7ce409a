"""AdamW over master weights, with optional bfloat16 moments and offload to host memory between steps.

    kept: moments [dtype ``moments``, place ``offload``], masters ── loaded ──> float32, on the device
                      one parameter at a time ── AdamW ── publish ── stored, moments rounded ──> kept

With neither setting, all parameters step together and in place. Rounding to bfloat16 is stochastic: a number
is rounded up with the probability of the part that is cut off. Otherwise a second moment that changes by less
than its last bit would never change. The random numbers are counter-based, so a resumed run draws the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rillflow.formulas.counter import philox
from rillflow.training.config import OptimizerConfig
from rillflow.training.offload import OnHost, host_memory

MOMENTS = ("exp_avg", "exp_avg_sq")
EPS = 1e-8
"""PyTorch's default of AdamW's eps."""
_AT_ONCE = 1 << 24
"""Numbers that are rounded at once."""


class AdamW:
    """AdamW by parameter name.

    Args:
        masters: the parameters to step.
        apart: names of masters that are not the weights themselves; ``offload`` moves them too.
        config: decays and storage of the state.
        eps: added to the root of the second moment.
    """

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        apart: Iterable[str],
        config: OptimizerConfig,
        *,
        eps: float = EPS,
    ) -> None:
        self._masters, self._config, self._eps = masters, config, eps
        self._far = config.offload in ("optimizer", "all")
        self._dtype = torch.bfloat16 if config.optimizer_dtype == "bfloat16" else None
        self.hosts: dict[str, OnHost] = {
            name: OnHost([masters[name]], changes=True) for name in apart if self._far
        }
        """Masters in host memory."""
        self.state: dict[str, dict[str, Tensor]] = {}
        """Stored ``step`` and ``MOMENTS`` of every parameter that was stepped."""
        self.moved_bytes = 0 if self._far else None
        """Bytes moved between host and device in the last step, both ways; None without offload."""

    def step(self, steps: int, lr: float, publish: Callable[[Sequence[str]], None]) -> None:
        """Step every parameter that has a gradient.

        Args:
            steps: number of earlier optimiser steps.
            lr: the learning rate.
            publish: called with the names of new masters while they are on the device.
        """
        stepped = []
        for names, decay in self._batches():
            for name in names:
                if name in self.hosts:
                    self.hosts[name].bring()
            moments = [self._taken(name) for name in names]
            masters: list[Tensor] = [self._masters[name] for name in names]
            with torch.no_grad():
                adamw(
                    masters,
                    [master.grad for master in masters if master.grad is not None],
                    [first for first, _ in moments],
                    [second for _, second in moments],
                    [],
                    [self.state[name]["step"] for name in names],
                    fused=True,
                    amsgrad=False,
                    beta1=self._config.beta1,
                    beta2=self._config.beta2,
                    lr=lr,
                    weight_decay=decay,
                    eps=self._eps,
                    maximize=False,
                )
                publish(names)
                for name, new in zip(names, moments, strict=True):
                    self._lay(name, new, steps)
            stepped += names
        if self._far:
            hosts = [self.hosts[name].num_bytes for name in stepped if name in self.hosts]
            kept = [self.state[name][kind].nbytes for name in stepped for kind in MOMENTS]
            self.moved_bytes = 2 * sum(hosts + kept)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # after this, host memory may be read

    def load(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of one parameter: its ``step`` and ``MOMENTS``."""
        kept = {kind: self._empty(self._masters[name]).copy_(tensors[kind]) for kind in MOMENTS}
        step = tensors["step"].to(self._masters[name].device, copy=True)
        self.state[name] = {"step": step, **kept}

    def _batches(self) -> Iterator[tuple[list[str], float]]:
        """Yield names that step together, with their weight decay; vectors have none."""
        there = [name for name, master in self._masters.items() if master.grad is not None]
        for decay, is_matrix in ((self._config.weight_decay, True), (0.0, False)):
            alike = [name for name in there if (self._masters[name].dim() >= 2) == is_matrix]
            size = 1 if self._far or self._dtype else max(1, len(alike))
            yield from ((alike[start : start + size], decay) for start in range(0, len(alike), size))

    def _empty(self, master: Tensor) -> Tensor:
        """Allocate storage for a moment."""
        like = torch.empty_like(master, dtype=self._dtype, device="meta")
        return host_memory(like, master.device) if self._far else torch.empty_like(like, device=master.device)

    def _taken(self, name: str) -> list[Tensor]:
        """Return the moments in the masters' dtype on the device; the stored tensors if they already are."""
        master = self._masters[name]
        if name not in self.state:
            step = torch.zeros((), dtype=torch.float32, device=master.device)
            self.state[name] = {"step": step} | {kind: self._empty(master).zero_() for kind in MOMENTS}
        kept = [self.state[name][kind] for kind in MOMENTS]
        if not self._far and not self._dtype:
            return kept
        return [each.to(master.device, master.dtype, copy=True, non_blocking=True) for each in kept]

    def _lay(self, name: str, moments: Sequence[Tensor], steps: int) -> None:
        """Store a parameter's moments, and its master if offloaded, between steps."""
        if name in self.hosts:
            self.hosts[name].leave()
        for place, (kind, moment) in enumerate(zip(MOMENTS, moments, strict=True)):
            kept = self.state[name][kind]
            if kept is not moment:
                drawn = (zlib.crc32(name.encode()), place, steps)
                narrow = rounded(moment, drawn) if self._dtype else moment
                kept.copy_(narrow, non_blocking=True)


def rounded(numbers: Tensor, drawn: tuple[int, int, int]) -> Tensor:
    """Return the numbers in bfloat16, rounded up or down at random so that the expectation is exact.

    Args:
        numbers: finite numbers of any float type.
        drawn: key, stream and step of the random numbers.
    """
    key, stream, step = drawn
    found = torch.empty_like(numbers, dtype=torch.bfloat16).view(-1)
    for start in range(0, numbers.numel(), _AT_ONCE):
        part = numbers.reshape(-1)[start : start + _AT_ONCE].float().view(torch.int32)
        # one counter gives four words of 32 bits: eight random numbers of 16 bits, one for each rounding
        counters = torch.arange(start // 8, start // 8 + -(-len(part) // 8), device=numbers.device)
        parts = (counters, *(torch.full_like(counters, each) for each in (step, stream, 0)))
        words = philox(torch.stack(parts, dim=-1), (key, 0))
        bits = torch.stack((words & 0xFFFF, words >> 16), dim=-1).view(-1)[: len(part)].to(torch.int32)
        found[start : start + len(part)] = (part + bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    return found.view(numbers.shape)
