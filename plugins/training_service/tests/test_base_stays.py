"""A server notes in the run whose checkpoint it serves that its clients' adapters stand on it."""

from __future__ import annotations

from pathlib import Path

from rillflow.controller.checkpoint import save_checkpoint
from rillflow.runs import layout
from rillflow.runs.layout import kept_steps
from rillflow.runs.pins import pins_of
from rillflow_training_service.server import hold_base


def test_a_served_checkpoint_stays_while_its_run_trains_on(tmp_path: Path) -> None:
    run, clients = tmp_path / "run", tmp_path / "clients"
    run.mkdir()
    (run / layout.LOCK).touch()
    for step in (1, 2, 3):
        save_checkpoint(run / layout.CHECKPOINTS, step, lambda _: {}, {}, 1)
        if step < 3:
            folder = run / layout.CHECKPOINTS / f"step-{step:06d}/policy"
            folder.mkdir()
            assert hold_base(folder, clients) == ()
    assert kept_steps(run / layout.CHECKPOINTS) == [1, 2, 3]
    (pin,) = pins_of(run)
    assert pin.path == str(clients) and pin.child is None
    clients.mkdir()
    assert pin.child == clients
    assert hold_base(clients, clients) == ()
