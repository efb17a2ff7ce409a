"""A pinned checkpoint stays however a run saves; a note that cannot be read or followed keeps it too."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.controller.checkpoint import save_checkpoint
from rillflow.runs import layout
from rillflow.runs.json_lines import encode
from rillflow.runs.layout import kept_steps
from rillflow.runs.pins import Pins, pin_notes, pins_of

CHILD = "0123456789abcdef"


def model(folder: Path, text: str = "a") -> Mapping[str, Any]:
    (folder / "policy").mkdir()
    (folder / "policy/config.json").write_text("{}")
    (folder / "policy/model.safetensors").write_text(text)
    return {}


def save(run: Path, step: int, keep: int = 1, text: str = "a") -> None:
    save_checkpoint(run / layout.CHECKPOINTS, step, lambda folder: model(folder, text), {}, keep)


def child_at(path: Path, identity: str = CHILD) -> Path:
    path.mkdir()
    (path / layout.LOCK).touch()
    (path / layout.ENVIRONMENT).write_bytes(encode({"format": 1, "run": identity, "starts": []}))
    return path


def test_a_pinned_checkpoint_stays_and_a_missing_one_cannot_be_pinned(tmp_path: Path) -> None:
    run, pins = tmp_path / "run", Pins(child_at(tmp_path / "child"), CHILD)
    save(run, 1)
    assert not pins.hold(run, "policy 0", 2)
    assert pins.hold(run, "policy 0", 1)
    for step in (2, 3):
        save(run, step)
    assert kept_steps(run / layout.CHECKPOINTS) == [1, 3]
    assert pins.hold(run, "policy 0", 3)  # the child began anew with a newer one
    pins.settle()
    save(run, 4)
    assert kept_steps(run / layout.CHECKPOINTS) == [3, 4]


def test_uses_of_an_earlier_start_stay_until_the_start_is_settled(tmp_path: Path) -> None:
    run, child = tmp_path / "run", child_at(tmp_path / "child")
    for step in (1, 2):
        save(run, step, keep=9)
    first = Pins(child, CHILD)
    assert first.hold(run, "policy 0", 1) and first.hold(run, "reward 0", 2)
    first.settle()
    again = Pins(child, CHILD)
    assert again.hold(run, "policy 0", 1)
    assert pins_of(run)[0].uses == {"policy 0": 1, "reward 0": 2}
    again.settle()
    assert pins_of(run)[0].uses == {"policy 0": 1}
    Pins(child, CHILD).settle(former=[run])
    assert pins_of(run) == []


def test_a_start_that_fails_removes_only_the_pins_that_it_made(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    save(run, 1)
    save(other, 1)
    child = child_at(tmp_path / "child")
    Pins(child, CHILD).hold(run, "policy 0", 1)
    with Pins(child, CHILD) as pins:
        assert pins.hold(run, "policy 0", 1) and pins.hold(other, "critic 0", 1)
    assert len(pins_of(run)) == 1 and pins_of(other) == []


def test_a_pin_that_cannot_be_read_keeps_every_checkpoint_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1)
    (run / layout.USED_BY).mkdir()
    for number, text in enumerate(("", "[]", '{"path": 3}', '{"path": "a", "run": "b", "uses": {"c": "d"}}')):
        (run / layout.USED_BY / f"{number}.json").write_text(text)
    save(run, 2)
    assert kept_steps(run / layout.CHECKPOINTS) == [1, 2]
    assert sum("cannot be read, so every checkpoint is kept" in note for note in pin_notes(run)) == 4


def test_a_child_is_found_under_another_name_in_its_folder(tmp_path: Path) -> None:
    run, child = tmp_path / "run", child_at(tmp_path / "child")
    save(run, 1)
    Pins(child, CHILD).hold(run, "policy 0", 1)
    child.rename(tmp_path / "renamed")
    child_at(tmp_path / "child", "another run")
    assert pins_of(run)[0].child == tmp_path / "renamed"
    assert pin_notes(run) == [f"{run}/checkpoints/step-000001 is kept: {tmp_path / 'renamed'} began from it"]
    shutil.rmtree(tmp_path / "renamed")
    (note,) = pin_notes(run)
    assert f"{tmp_path / 'child'}, which is not there" in note
    assert f"remove {run / layout.USED_BY / CHILD}.json" in note


def test_a_pinned_checkpoint_that_is_written_again_with_other_weights_stays_beside_the_new_one(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    save(run, 1)
    Pins(child_at(tmp_path / "child"), CHILD).hold(run, "policy 0", 1)
    save(run, 1)
    assert [path.name for path in layout.checkpoint_folders(run / layout.CHECKPOINTS)] == ["step-000001"]
    save(run, 1, text="b")
    save(run, 2)
    names = [path.name for path in layout.checkpoint_folders(run / layout.CHECKPOINTS)]
    assert names == ["step-000002", "step-000001", "step-000001.replaced"]


def test_what_a_killed_driver_left_of_a_removed_checkpoint_goes_with_the_next_removal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1)
    (run / layout.CHECKPOINTS / ".step-000000.removed").mkdir()
    save(run, 2)
    assert sorted(path.name for path in (run / layout.CHECKPOINTS).iterdir()) == ["step-000002"]


@settings(max_examples=15)
@given(
    actions=st.lists(st.tuples(st.sampled_from(("save", "pin", "free")), st.integers(0, 2)), max_size=10),
    keep=st.integers(1, 3),
)
def test_any_order_of_saves_and_pins_keeps_what_is_pinned_and_the_newest(
    tmp_path_factory: Any, actions: list[tuple[str, int]], keep: int
) -> None:
    run = tmp_path_factory.mktemp("run") / "run"
    step, pinned = 1, dict[int, int]()
    save(run, step, keep)
    for action, child in actions:
        if action == "save":
            step += 1
            save(run, step, keep)
        elif action == "pin":
            newest = kept_steps(run / layout.CHECKPOINTS)[-1]
            assert Pins(run.parent / str(child), f"{child}").hold(run, "policy 0", newest)
            pinned[child] = newest
        else:
            pinned.pop(child, None)
            (run / layout.USED_BY / f"{child}.json").unlink(missing_ok=True)
        there = set(kept_steps(run / layout.CHECKPOINTS))
        assert there >= {*pinned.values()} | {*range(max(1, step - keep + 1), step + 1)}
        if action == "save":
            assert there == {*pinned.values()} | {*range(max(1, step - keep + 1), step + 1)}


def _pin_newest(run: Path, child: Path, count: int, results: Any) -> None:
    """Pin the newest checkpoint again and again, and count those that are gone although they were pinned."""
    lost = held = 0
    for number in range(count):
        step = kept_steps(run / layout.CHECKPOINTS)[-1]
        if Pins(child, f"{number:016d}").hold(run, "policy 0", step):
            held += 1
            lost += not (run / layout.CHECKPOINTS / f"step-{step:06d}").is_dir()
    results.put((held, lost))


def test_a_pin_and_a_removal_at_the_same_time_never_lose_the_checkpoint(tmp_path: Path) -> None:
    run, results = tmp_path / "run", multiprocessing.get_context("fork").Queue()
    save(run, 1)
    pinning = multiprocessing.get_context("fork").Process(
        target=_pin_newest, args=(run, tmp_path / "child", 60, results)
    )
    ended = threading.Event()
    pinning.start()
    threading.Thread(target=lambda: (pinning.join(), ended.set())).start()
    step = 1
    while not ended.is_set():
        step += 1
        save(run, step)
    held, lost = results.get(timeout=10)
    assert held > 0 and lost == 0
    there = {*kept_steps(run / layout.CHECKPOINTS)}
    assert all(set((pin.uses or {}).values()) <= there for pin in pins_of(run))
