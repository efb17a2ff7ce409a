"""Buffer worker: recomputes outputs of fragments between actors and trainer, which is reanalysis.

    actors ─ written slots ─> BufferWorker: reanalyse in place, newest weights ─ ready slots ─> trainer

While a fragment waits, the learner goes on, and the outputs of the fragment's policy grow old. If a buffer
worker is killed, its slots stay written, and its replacement recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.policy import Learner
from rillflow_classic.streams.streams import Streams
from rillflow_classic.workers.polling import PollingWorker

Reanalysis = Callable[[Any, Fragment], Mapping[str, Array]]
"""``reanalyse(learner, fragment)``: returns outputs of the fragment that replace the actor's, by name."""


class BufferWorker(PollingWorker):
    """Learners that lend their networks, and the fragments on their way.

    Args:
        learners: learner of every policy, for its policy's weights.
        streams: its end of the streams.
        reanalyse: recomputes outputs.
    """

    def __init__(self, learners: Mapping[str, Learner], streams: Streams, reanalyse: Reanalysis) -> None:
        super().__init__("buffer_worker", streams)
        self._learners, self._ends, self._reanalyse = learners, streams, reanalyse
        self._policies = {name: learner.policy for name, learner in learners.items()}

    def turn(self) -> bool:
        """Compute all fragments that have arrived, and pass them on; return whether there were any."""
        if not self._ends.refresh(self._policies):
            return False
        found = self._ends.take(0.0)
        for received in found:
            for name, fragment in received.fragments.items():
                for output, values in self._reanalyse(self._learners[name], fragment).items():
                    fragment.outputs[output][...] = values
                self.report.rows += fragment.valid.size
            self.report.batches += 1
            received.release()
        return bool(found)

    def reset(self, seed: int) -> None:
        """Do nothing: it draws no random numbers."""


def fresh_values(learner: Any, fragment: Fragment) -> Mapping[str, Array]:
    """Return the values that the newest weights give every step; a recurrent learner computes its own."""
    if fragment.state is not None:
        return {}
    observations = fragment.observations[:-1]
    values = learner.policy.evaluate(observations.reshape(-1, *observations.shape[2:]), None)[1]
    return {"values": values.reshape(fragment.valid.shape)}
