"""Saved flight: the groups in flight that a checkpoint of a ready-first run keeps.

    step c opens ─ state of the flight ─> replica: ... receive v_c, save ─> its rows ─┐
                     └─ groups collected before that save ────────────> their rows ───┴─> ahead/

The checkpoint of step c holds the weights v_c. Rows in flight have tokens of older weights, which a resume
lacks. When a replica has received v_c, its rows are data: prompts, tokens, log probabilities and versions.
So each replica writes its rows at that place in the order of its calls (``Sampler.save``). What it samples
later follows from these rows and from weights that a resume trains again.

A resume repeats the decisions after the checkpoint (``decisions``). It skips the calls of a replica up to the
``save`` of that replica, because the saved rows contain their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rillflow.controller.checkpoint import AHEAD, Checkpoint
from rillflow.controller.decisions import DecisionLog, Decisions, Event, left_at
from rillflow.controller.executor import GroupExecutor, GroupPart, write_rows
from rillflow.controller.group_table import GENERATE
from rillflow.roles.sampler import GroupId
from rillflow.workers.arguments import Lie
from rillflow.workers.pending import Pending

FLIGHT = "flight"
"""Key of the state of the flight, in the position in the data and in a checkpoint's state."""


@dataclass(frozen=True, kw_only=True)
class CollectedGroup:
    """A group whose rows a replica has given to the store."""

    group: GroupId
    """Epoch and prompt id."""
    begun: int
    """Position of the decision that began it."""
    replica: int
    """Number of its replica."""
    position: int
    """Number of decisions before its rows were collected."""
    rows: Pending
    """Its rows."""


@dataclass(kw_only=True, eq=False)
class FlightSave:
    """The groups in flight of a checkpoint, while they are being written."""

    executor: GroupExecutor
    step: int
    """Step of the checkpoint."""
    folder: Path
    """Folder to write into."""
    version: int
    """Publishes of the phase that the checkpoint's weights include."""
    replicas: set[int]
    """Numbers of the replicas that write their rows."""
    scored: Mapping[str, Mapping[GroupId, Pending]]
    """Results of streamed stages that were there when the step was opened."""
    collected: list[CollectedGroup] = field(default_factory=list)
    """Groups whose rows were collected since no step up to the checkpoint's took them."""
    saved: dict[int, tuple[int, Sequence[Pending]]] = field(default_factory=dict)
    """Position of the ``save`` of each replica, and its results."""
    state: dict[str, Any] | None = None
    """What ``state.json`` says about the files; None until they are being written."""
    _heard: set[int] = field(default_factory=set)
    """Replicas that have written their rows."""
    _writing: list[Pending] = field(default_factory=list)

    @property
    def events(self) -> Sequence[Sequence[Pending]]:
        """Lists of pending results; a list is due when all of it is ready."""
        if self.state is not None:
            return [self._writing]
        return [made for replica, (_, made) in self.saved.items() if replica not in self._heard]

    @property
    def is_written(self) -> bool:
        """Whether all files are written."""
        return self.state is not None and all(each.is_ready for each in self._writing)

    def hear(self, replica: int, deadline_s: float) -> None:
        """Note whether a replica has written its rows; once all have, write the collected groups.

        Raises:
            RankDied: one of its ranks died before.
            RunDirectoryError: the disk fails.
        """
        _, made = self.saved.get(replica, (0, ()))
        if replica not in self._heard and made and all(each.is_ready for each in made):
            for each in made:
                each.read(deadline_s)
            self._heard.add(replica)
            self._write_if_all()

    def leave_out(self, replica: int) -> None:
        """Wait no longer for a replica whose ranks cannot be replaced."""
        self.replicas.discard(replica)
        self._write_if_all()

    def _write_if_all(self) -> None:
        if self._heard >= self.replicas and self.state is None:
            self.write()

    def lose(self, replica: int) -> None:
        """Forget the rows of a replica that died before it had written them."""
        if replica not in self._heard:
            self.saved.pop(replica, None)

    def write(self) -> None:
        """Write the collected groups; without the rows of replicas that have not written theirs."""
        layers: list[dict[GroupId, CollectedGroup]] = []
        for each in self.collected:
            saved_at = self.saved[each.replica][0] if each.replica in self.saved else each.position
            if each.position <= saved_at and not (each.rows.is_ready and each.rows.has_failed):
                layer = next((rows for rows in layers if each.group not in rows), None)
                if layer is None:
                    layers.append(layer := {})
                layer[each.group] = each
        self.state = {
            "saves": {str(replica): position for replica, (position, _) in self.saved.items()},
            "layers": len(layers),
            "rows": [
                [*each.group, each.begun, each.position, number]
                for number, layer in enumerate(layers)
                for each in layer.values()
            ],
            "scored": {stage: [list(group) for group in rows] for stage, rows in self.scored.items()},
        }
        for number, layer in enumerate(layers):
            self._write(GENERATE, f"rows-{number:03d}", {each.group: each.rows for each in layer.values()})
        for number, (stage, rows) in enumerate(self.scored.items()):
            self._write(stage, f"scores-{number:03d}", rows)

    def _write(self, stage: str, name: str, rows: Mapping[GroupId, Pending]) -> None:
        place = self.executor.groups["policy"].places[0]
        part = GroupPart(place=place, rows=rows)
        gathered = self.executor.gathered(stage, [part], Lie.new(is_whole=True))
        file = str(self.folder / f"{name}.safetensors")
        self._writing.append(self.executor.apply(write_rows, file, gathered, place=place))

    def finish(self, deadline_s: float) -> Mapping[str, Any]:
        """Return what ``state.json`` says about the files.

        Raises:
            RunDirectoryError: the disk fails.
        """
        for each in self._writing:
            each.read(deadline_s)
        assert self.state is not None  # it is written
        return self.state


@dataclass(frozen=True, kw_only=True)
class KeptFlight:
    """The groups in flight of the checkpoint that a phase resumes from."""

    state: Mapping[str, Any]
    """State of the flight when the checkpoint's step was opened; see ``Flight.state``."""
    saved: Mapping[str, Any]
    """What ``FlightSave`` wrote; empty if it wrote nothing."""
    folder: Path
    """Folder of its files."""
    decisions: Decisions
    """The decisions after the checkpoint."""
    left_at: int | None
    """Position where an earlier resume left the decisions that led to the saved rows; None if none did."""

    @property
    def saves(self) -> Mapping[int, int]:
        """Position of the ``save`` of each replica whose rows go on."""
        has_left = self.decisions.left or not self.decisions.may_leave
        return {} if has_left else {int(each): at for each, at in self.saved.get("saves", {}).items()}

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, state: Mapping[str, Any], decisions: Decisions, at: int | None
    ) -> KeptFlight:
        """Return the flight of a checkpoint, without rows whose decisions the run left from ``at`` on."""
        saved = dict(checkpoint.state.get(FLIGHT, {}))
        if at is not None:
            saves = saved.get("saves", {})
            is_whole = len(saves) == len(state["versions"]) and max(saves.values()) < at
            at = None if is_whole else at
        if at is not None:
            saved |= {"saves": {}, "rows": [row for row in saved.get("rows", ()) if row[2] < at]}
        folder = (checkpoint.path / AHEAD).absolute()
        return cls(state=state, saved=saved, folder=folder, decisions=decisions, left_at=at)

    def loaded(self, executor: GroupExecutor) -> dict[tuple[GroupId, int], tuple[int, Pending]]:
        """Return position and rows of the collected groups, by group and the decision that began it."""
        files = [self.folder / f"rows-{n:03d}.safetensors" for n in range(self.saved.get("layers", 0))]
        layers = [executor.loaded(file.absolute()) for file in files]
        return {
            ((epoch, prompt), begun): (position, layers[layer])
            for epoch, prompt, begun, position, layer in self.saved.get("rows", ())
        }

    def scored(self, executor: GroupExecutor) -> dict[str, tuple[list[GroupId], Pending]]:
        """Return the groups of each streamed stage that were scored, and their results."""
        found = {}
        for number, (stage, groups) in enumerate(self.saved.get("scored", {}).items()):
            file = self.folder / f"scores-{number:03d}.safetensors"
            found[stage] = [(epoch, prompt) for epoch, prompt in groups], executor.loaded(file.absolute())
        return found


def kept_flight(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    *,
    log: DecisionLog,
    events: Sequence[Event],
    replicas: int,
    needs_rows: bool,
    blocked: str = "",
) -> KeptFlight:
    """Return the flight of a checkpoint, with the decisions of the interrupted run that follow it.

    Args:
        checkpoint: the checkpoint.
        state: its state of the flight.
        log: the run's decisions.
        events: all decisions of the run.
        replicas: number of replicas now.
        needs_rows: whether rows may be in flight at a checkpoint.
        blocked: why the decisions may not be repeated; empty if they may.
    """
    position, were = state["position"], len(state["versions"])
    if state["is_last"]:  # nothing was left to decide
        needs_rows, blocked = False, ""
    there = {*map(int, checkpoint.state.get(FLIGHT, {}).get("saves", {}))}
    at = left_at(events, position)
    if were != replicas and at != position:
        blocked = f"the sampler had {were} replicas and has {replicas}"
    elif len(events) < position:
        blocked = f"decisions.jsonl has {len(events)} decisions, and the checkpoint follows {position}"
    elif needs_rows and at is None and there != {*range(replicas)}:
        blocked = blocked or "its checkpoint holds no rows in flight"
    decisions = Decisions(log, events[position:], min(position, len(events)))
    if blocked:
        decisions.leave(blocked)
    return KeptFlight.of(checkpoint, state, decisions, None if blocked else at)
