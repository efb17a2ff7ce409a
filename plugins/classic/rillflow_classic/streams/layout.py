"""Layout: record types of what passes between actors, policy workers and the trainer, as numpy's dtypes.

layout_of(policy, environment) ─> ActingLayout ─┬─ request, answer: one row of an inference stream
                                                └─ fragment(T): a slot of a sample stream, or new memory

A field of a record is an array. ``row`` views the fields of one record, without a copy.

Legend: T steps, N slots, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rillflow.errors import StreamError
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.fragment import Array, FinishedEpisode, Fragment
from rillflow_classic.policy import Acted, ActorPolicy

Arrays = Mapping[str, Array]
Record = np.dtype[Any]
"""Type of a record: names, types and shapes of its arrays."""
OUTPUT = "outputs."
"""Prefix of the names of a policy's outputs."""
FIELDS = ("observations", "actions", "rewards", "terminated", "truncated", "valid", "versions")
"""Arrays that every fragment has."""


@dataclass(frozen=True, kw_only=True)
class ActingLayout:
    """What one policy reads and returns for N slots."""

    request: Record
    """``observations`` [N, ...], and ``state`` [N, ...] if it is recurrent."""
    answer: Record
    """``actions`` [N] or [N, A], outputs [N, ...], and ``state``."""
    initial: Array | None
    """[N, ...] recurrent state at the start of an episode; None without one."""

    def fragment(self, steps: int) -> Record:
        """Return the record of a fragment of T steps."""
        actions = self.answer["actions"]
        outputs = [name for name in self.answer.names or () if name.startswith(OUTPUT)]
        fields: dict[str, Any] = {
            "observations": (self.request["observations"], (steps + 1,)),
            "actions": (actions, (steps,)),
            "rewards": ("f4", (steps, actions.shape[0])),
            **dict.fromkeys(("terminated", "truncated", "valid"), ("?", (steps, actions.shape[0]))),
            "versions": ("i8", (steps,)),
            **{name: (self.answer[name], (steps,)) for name in outputs},
        }
        if self.initial is not None:
            fields["state"] = self.initial.dtype, self.initial.shape
        return np.dtype([*fields.items()], align=True)


def layout_of(policy: ActorPolicy, environment: VectorEnvironment, num_slots: int) -> ActingLayout:
    """Act once on zeros, and return what the policy reads and returns.

    The call draws random numbers: seed the policy afterwards.
    """
    space = environment.observation_space
    if space.shape is None or space.dtype is None:
        raise StreamError(
            f"an observation is a {type(space).__name__}",
            why="actors write observations into one array of a fixed shape",
            fix="flatten the observation, for example with gymnasium.wrappers.FlattenObservation",
        )
    observations, initial = np.zeros((num_slots, *space.shape), space.dtype), policy.initial_state(num_slots)
    state = {} if initial is None else {"state": initial}
    answer = arrays_of_acted(policy.act(observations, initial))
    return ActingLayout(
        request=record_of({"observations": observations} | state), answer=record_of(answer), initial=initial
    )


def record_of(arrays: Arrays) -> Record:
    """Return the record of arrays by name."""
    return np.dtype([(name, each.dtype, each.shape) for name, each in arrays.items()], align=True)


def extended(record: Record, **fields: Any) -> Record:
    """Return a record with further fields of given types."""
    own = ((name, record[name]) for name in record.names or ())
    return np.dtype([*own, *fields.items()], align=True)


def row(columns: Arrays, at: int | Array) -> dict[str, Array]:
    """Return a view of one record of the columns [rows, ...]; with several indices, copies."""
    return {name: column[at] for name, column in columns.items()}


def empty(record: Record) -> dict[str, Array]:
    """Return the fields of one new record."""
    return row(columns_of(np.empty(1, record)), 0)


def columns_of(table: Array) -> dict[str, Array]:
    """View the columns of records [rows] by name."""
    return {name: table[name] for name in table.dtype.names or ()}


def fragment_of(
    arrays: Arrays, *, episodes: Sequence[FinishedEpisode] = (), policy: str = "policy", actor: int = 0
) -> Fragment:
    """Return the arrays of a fragment's record as a Fragment, without a copy."""
    return Fragment(
        **{name: arrays[name] for name in FIELDS},
        outputs=outputs_of(arrays),
        state=arrays.get("state"),
        episodes=tuple(episodes),
        policy=policy,
        actor=actor,
    )


def acted_of(arrays: Arrays) -> Acted:
    """Return the arrays of an answer's record as Acted, without a copy."""
    return Acted(actions=arrays["actions"], outputs=outputs_of(arrays), state=arrays.get("state"))


def arrays_of_acted(acted: Acted) -> dict[str, Array]:
    """Return the arrays of Acted by the names of an answer's record."""
    state = {} if acted.state is None else {"state": acted.state}
    return {"actions": acted.actions} | {OUTPUT + n: array for n, array in acted.outputs.items()} | state


def outputs_of(arrays: Arrays) -> dict[str, Array]:
    """Return a policy's outputs among the arrays of a record."""
    return {name.removeprefix(OUTPUT): array for name, array in arrays.items() if name.startswith(OUTPUT)}
