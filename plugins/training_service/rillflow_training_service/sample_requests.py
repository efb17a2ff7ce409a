"""Sample requests: from the JSON of ``asample`` to rows, and from rows to the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rillflow.errors import DataError, RillflowError
from rillflow.records.rollout import Rollout
from rillflow.serving.http_body import checked_request
from rillflow_training_service.checkpoints import CheckpointPath
from rillflow_training_service.requests import SampleBody, SamplingParams
from rillflow_training_service.sampling import (
    SampleRequest,
    Snapshot,
    sampling_of,
    sequence_of,
    stop_of,
)
from rillflow_training_service.service import Service
from rillflow_training_service.sessions import SamplingSession
from rillflow_training_service.wire import encoded_samples

BASE = "base"
"""Key of the base model's own weights."""
_UNSERVED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")


@dataclass(kw_only=True, eq=False)
class Sampling:
    """A request on its way: begun in the engine thread, answered from there."""

    service: Service
    """Samples."""
    sampler: SamplingSession
    """Weights to sample from."""
    asked: SampleBody
    """The request."""
    name: str
    """The request's id."""
    tell: Callable[[Any], None]
    """Receives the answer or an error; from the engine thread."""
    wake: Callable[[], None]
    """Makes the engine thread look at the request again."""
    _begun: SampleRequest | None = None
    _is_left: bool = False
    _prompt: Tensor | None = None

    def begin(self) -> None:
        """Begin to sample; called in the engine thread.

        Raises:
            RillflowError: the request cannot be sampled.
        """
        if self._is_left:
            return
        self._begun = self._rows()
        self._prompt = self.service.sample(self._snapshot(), self._begun)

    def cancel(self) -> None:
        """Give the request up; from any thread."""
        self._is_left = True
        if self._begun is not None:
            self._begun.is_left = True
        self.wake()

    def _rows(self) -> SampleRequest:
        asked = self.asked
        for name in _UNSERVED:
            if getattr(asked, name):
                raise DataError(f"{name} is not served", why="only prompt_logprobs are", fix="leave it out")
        odd = [each.type for each in asked.prompt.chunks if each.type != "encoded_text"]
        if odd:
            raise DataError(f"the prompt has a chunk of type {odd[0]}", why="the model reads tokens only")
        prompt = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
        room = self.service.base.model.context - len(prompt)
        params = checked_request(SamplingParams, asked.sampling_params)
        sampling, seed = sampling_of(params, room), params.seed
        key = f"{self.sampler.random_key} {asked.seq_id}" if seed is None else f"seed {seed} {prompt}"
        last = asked.prompt_logprobs_last_n
        if last is not None and not 1 <= last < len(prompt):
            raise DataError(
                f"prompt_logprobs_last_n is {last}",
                why=f"it is from 1 to {len(prompt) - 1}, a part of the prompt",
            )
        return SampleRequest(
            name=self.name,
            prompt=prompt,
            count=asked.num_samples,
            sampling=sampling,
            stop=stop_of(params),
            wants_prompt=(last or 0) if asked.prompt_logprobs else None,
            random_key=key,
            tell=self._ended,
        )

    def _snapshot(self) -> Snapshot:
        if self.sampler.path is not None:
            return self.service.snapshot_at(CheckpointPath.parsed(self.sampler.path))
        if self.sampler.model is not None:
            return self.service.snapshot_of(self.sampler.model, self.sampler.key)
        return Snapshot(key=BASE, shape=None, weights={})

    def _ended(self, told: list[Rollout] | RillflowError) -> None:
        if isinstance(told, RillflowError):
            self.tell(told)
            return
        assert self._begun is not None
        sequences = [sequence_of(each, len(self._begun.prompt)) for each in told]
        self.tell(encoded_samples(sequences, self._prompt))
