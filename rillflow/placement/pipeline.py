"""Pipeline: seconds and bytes of a model's micro-batches on every pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The passes of a model in one optimiser step.

    Example:
        Pipeline(name="actor", micro_batches=32, forward_s=(0.5,) * 8, backward_s=(1.0,) * 8,
                 activation_bytes=2e9)
    """

    name: str
    """Name of the model, or of its stage."""
    micro_batches: int
    """Micro-batches of each replica."""
    forward_s: tuple[float, ...]
    """Seconds of a micro-batch's forward pass, by stage."""
    backward_s: tuple[float, ...]
    """Seconds of a micro-batch's backward pass, by stage."""
    activation_bytes: float
    """Bytes that a stage keeps of a micro-batch from its forward pass to the end of its backward pass."""
    send_s: float = 0.0
    """Seconds to send a micro-batch to the next stage. Sending occupies neither device."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward_s)

    @property
    def bound_s(self) -> float:
        """Least seconds of this pipeline alone: the way to a stage, the stage's work, and the way back."""
        work = [self.micro_batches * (f + b) for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        return max(self.arrival_s(s) + spent + self.return_s(s) for s, spent in enumerate(work))

    def arrival_s(self, stage: int) -> float:
        """Return the earliest start of a stage."""
        return sum(self.forward_s[:stage]) + stage * self.send_s

    def return_s(self, stage: int) -> float:
        """Return the least seconds from the last end on a stage to the end of the pipeline."""
        return sum(self.backward_s[:stage]) + stage * self.send_s

    def depth(self, stage: int, memory_bytes: float) -> int:
        """Return the micro-batches that 1F1B keeps on a stage at once, within a memory cap."""
        most = min(self.stages - stage, self.micro_batches)
        if not self.activation_bytes:
            return most
        return int(min(most, memory_bytes / self.activation_bytes * (1 + 1e-9)))
