"""Meetings of a side with its store: no progress is lost or counted twice, whatever others do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rillflow_links.sides.exchange import ExchangeTurn, SideMeeting, SideSettings, claim_name
from rillflow_links.sides.merger import Merger, read_records
from rillflow_links.sides.outer import OuterSettings
from rillflow_links.sides.packed import pack, read_version
from rillflow_links.sides.rules import MergeRule
from rillflow_links.sides.side_state import SideState, forget_from, identity
from rillflow_links.sides.store import SideError, SideStore

AVERAGE = OuterSettings(lr=1, momentum=0)


class Toy:
    """A side whose weight is one number, which a step raises by its stride.

    Args:
        folder: folder of the store and of the sides' runs.
        name: name of the side.
        stride: change of the weight in a step.
    """

    def __init__(self, folder: Path, name: str, stride: float = 1.0) -> None:
        (folder / name).mkdir(exist_ok=True)
        self.settings = SideSettings(
            store=str(folder / "store"),
            name=name,
            folder=folder / name / "sides",
            coding={"gradients": "dense", "share": 0.01},
            grace_s=0.0,
            start_s=0.0,
        )
        self.store, self.stride, self.step = SideStore(self.settings.store), stride, 0
        claim_name(self.store, self.settings, joined=0)
        version = max(self.store.newest(), 0)
        self.weights = read_version(self.store, version) if version in range(self.store.newest() + 1) else {}
        if not self.weights:
            self.weights = {"a": torch.zeros(1, dtype=torch.float64)}
            self.store.write(f"starts/{name}.safetensors", pack(self.weights, {}))
        base = {name: each.clone() for name, each in self.weights.items()}
        SideState(version=version, base=base).save(self.settings.folder, 0)

    def train(self, steps: int) -> None:
        self.weights["a"] = self.weights["a"] + self.stride * steps
        self.step += steps

    def meet(self, *, is_resumed: bool = False, is_boundary: bool = True) -> SideMeeting:
        folder = self.settings.folder
        if is_resumed:
            forget_from(folder, self.step)
        turn = ExchangeTurn(step=self.step, tokens=1, is_boundary=is_boundary, is_resumed=is_resumed)
        meeting = SideMeeting(self.settings, SideState.load(folder, self.step), self.weights)
        meeting.meet(turn)
        meeting.state.save(folder, self.step)
        self.weights = dict(meeting.local)
        return meeting

    @property
    def value(self) -> float:
        return float(self.weights["a"])


def merger(toy: Toy, **rule: float) -> Merger:
    """Return a new merger that waits for nobody."""
    return Merger(toy.store, replace(MergeRule(grace_s=0), **rule), AVERAGE)  # type: ignore[arg-type]


def version(toy: Toy) -> tuple[int, float]:
    newest = toy.store.newest()
    return newest, float(read_version(toy.store, newest)["a"])


def test_a_side_takes_what_others_learned_and_keeps_what_it_learned_since(tmp_path: Path) -> None:
    one, other = Toy(tmp_path, "one"), Toy(tmp_path, "other", stride=10)
    assert merger(one).poll()
    for each in (one, other):
        each.train(2)
        each.meet()
    assert merger(one).poll()
    assert version(one) == (1, 11.0)
    one.train(2)
    one.meet()
    assert one.value == 13.0, "version 1, and two steps since the upload"
    assert merger(one).poll()
    assert version(one) == (2, 13.0)


def test_without_a_merger_it_trains_on_and_sends_everything_later(tmp_path: Path) -> None:
    one = Toy(tmp_path, "one")
    assert merger(one).poll()
    for _ in range(3):
        one.train(2)
        one.meet()
    assert one.value == 6.0
    assert len(one.store.names("contributions", ".safetensors")) == 1, "one is undecided"
    assert merger(one).poll()
    assert version(one) == (1, 2.0)
    one.train(2)
    one.meet()
    assert one.value == 8.0 and merger(one).poll() and version(one) == (2, 8.0)


def test_a_version_without_an_own_undecided_contribution_is_taken_beneath_it(tmp_path: Path) -> None:
    one, other = Toy(tmp_path, "one"), Toy(tmp_path, "other", stride=10)
    assert merger(one).poll()
    other.train(2)
    other.meet()
    assert merger(one).poll() and version(one) == (1, 20.0)
    one.train(2)
    late = one.meet()
    assert one.value == 22.0 and late.report(turn(one), "").behind == 1
    assert one.store.names("contributions", ".safetensors")[0] == "one.00000002.000000"


def turn(toy: Toy) -> ExchangeTurn:
    return ExchangeTurn(step=toy.step, tokens=1, is_boundary=True, is_resumed=False)


def test_a_late_contribution_counts_once(tmp_path: Path) -> None:
    one, other = Toy(tmp_path, "one"), Toy(tmp_path, "other", stride=10)
    assert merger(one).poll()
    one.train(2)
    one.meet()
    held = tmp_path / "held"
    uploaded = tmp_path / "store" / "contributions" / "one.00000002.000000.safetensors"
    uploaded.rename(held)  # it is slow to arrive
    other.train(2)
    other.meet()
    assert merger(one).poll() and version(one) == (1, 20.0)
    held.rename(uploaded)
    one.train(2)
    one.meet()
    assert one.value == 24.0, "version 1, its undecided two steps, and two more"
    assert merger(one).poll() and version(one) == (2, 22.0)
    assert read_records(one.store)[2]["contributions"][0]["late"] == 1
    one.train(2)
    one.meet()
    assert one.value == 26.0 and merger(one).poll() and version(one) == (3, 26.0)


def test_a_refused_contribution_is_given_up_for_the_newest_version(tmp_path: Path) -> None:
    one, other = Toy(tmp_path, "one"), Toy(tmp_path, "other", stride=10)
    assert merger(one).poll()
    for _ in range(2):
        other.train(2)
        other.meet()
        assert merger(one).poll()
    one.store.write_json("refused/one.00000002.000000.json", {"reason": "late"})
    one.train(2)
    state = SideState.load(one.settings.folder, 1)
    state.pending, state.sent = "one.00000002.000000", {"a": torch.tensor([2.0], dtype=torch.float64)}
    state.save(one.settings.folder, 1)
    one.train(2)
    one.meet()
    assert one.value == 42.0, "the two refused steps are gone, the two since are kept"


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("is_moved", [False, True])
def test_steps_that_are_trained_again_after_a_kill_count_once(
    tmp_path: Path, is_merged: bool, is_moved: bool
) -> None:
    one, other = Toy(tmp_path, "one"), Toy(tmp_path, "other", stride=10)
    assert merger(one).poll()
    one.train(1)
    saved = dict(one.weights)  # a checkpoint of step 1
    if is_moved:
        other.train(2)
        other.meet()
        assert merger(one).poll()
    one.train(1)
    one.meet()
    if is_merged:
        assert merger(one).poll()
    one.weights, one.step = saved, 1  # killed, and back
    one.train(1)
    one.meet(is_resumed=True, is_boundary=True)
    assert len([each for each in one.store.names("contributions", "") if each.startswith("one.")]) == 1
    while merger(one).poll():
        pass
    expected = (20.0 if is_moved else 0.0) + 2.0
    assert version(one)[1] == expected
    one.train(2)
    one.meet()
    assert one.value == expected + 2.0


def test_nothing_is_taken_twice_if_a_later_upload_is_there_after_a_kill(tmp_path: Path) -> None:
    one = Toy(tmp_path, "one")
    assert merger(one).poll()
    one.train(2)
    one.meet()
    one.train(1)
    saved = dict(one.weights)  # a checkpoint of step 3, with an undecided upload
    assert merger(one).poll() and version(one) == (1, 2.0)
    one.train(2)
    one.meet()
    assert merger(one).poll() and version(one) == (2, 5.0)
    one.weights, one.step = saved, 3  # killed, and back
    one.train(1)
    one.meet(is_resumed=True, is_boundary=False)
    assert one.value == 4.0
    one.train(1)
    one.meet()
    assert one.value == 5.0 and not merger(one).poll()
    one.train(2)
    one.meet()
    assert merger(one).poll() and version(one) == (3, 7.0)


def test_a_side_that_was_away_takes_the_newest_version_at_its_first_step(tmp_path: Path) -> None:
    one, other = Toy(tmp_path, "one"), Toy(tmp_path, "other", stride=10)
    assert merger(one).poll()
    other.train(2)
    other.meet()
    assert merger(one).poll()
    one.train(1)
    meeting = one.meet(is_resumed=True, is_boundary=False)
    assert one.value == 21.0 and meeting.state.version == 1
    assert one.store.names("contributions", ".safetensors") == ["other.00000002.000000"]


def test_a_new_side_begins_with_the_newest_version(tmp_path: Path) -> None:
    one = Toy(tmp_path, "one")
    assert merger(one).poll()
    one.train(2)
    one.meet()
    assert merger(one).poll()
    assert Toy(tmp_path, "new").value == 2.0


def test_a_name_belongs_to_one_run(tmp_path: Path) -> None:
    one = Toy(tmp_path, "one")
    claim_name(one.store, one.settings, joined=5)
    with pytest.raises(SideError, match='"one", and another run'):
        claim_name(one.store, replace(one.settings, folder=tmp_path / "elsewhere"), joined=0)


def test_states_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    folder, base = tmp_path / "sides", {"a": torch.zeros(2)}
    for step in (7, 20):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-000031.begun").mkdir()
    for step in (0, 5, 10, 15, 25, 30, 35, 40, 45):
        SideState(version=step, base=base, links={"a": {"error": torch.ones(2)}}).save(folder, step)
    assert [int(path.stem) for path in sorted(folder.glob("*.packed"))] == [5, 15, 30, 40, 45]
    state = SideState.load(folder, 42)
    assert state.version == 40 and torch.equal(state.links["a"]["error"], torch.ones(2))
    assert identity(folder) == identity(folder)
    forget_from(folder, 30)
    assert SideState.load(folder, 100).version == 15
    with pytest.raises(SideError, match="no state of an earlier step than 3"):
        SideState.load(folder, 3)
