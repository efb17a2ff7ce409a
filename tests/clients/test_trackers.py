"""Weights & Biases (offline), TensorBoard and MLflow as they are: by a recipe, resumed, and exported.

What was sent is read back with each tracker's own reader.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rillflow.cli.main import main
from tests.flows.conftest import SUMS, Tiny

LOSS = "policy/loss/mean"
BLOCK = 1 << 15
REST = f"steps = 2\n{SUMS}\n[run.trackers.NAME]\nwait_s = 120\nsamples = 2\nSETTINGS\n"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Return a folder for tiny runs, without keys of this user."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)  # MLflow writes the files of a local store there
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    return Tiny(tmp_path)


Scalars = dict[str, list[tuple[int, float]]]


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # the rest of a block is empty
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def wandb_scalars(run: Path) -> Scalars:
    """Return the history of every offline run, in the order of the starts."""
    from wandb.proto import wandb_internal_pb2

    found: Scalars = {}
    files = sorted((run / "trackers/wandb").glob("offline-run-*/*.wandb"))
    assert len({file.stem for file in files}) == 1, "every start goes on in one wandb run"
    for file in files:
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    return found


def tensorboard_scalars(run: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "trackers/tensorboard"))
    read.Reload()
    texts = {"config/text_summary", "config", "rollouts"} & set(read.Tags()["tensors"])
    assert texts, read.Tags()
    return {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def mlflow_scalars(run: Path) -> Scalars:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("sums")
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.status == "FINISHED" and one.data.params["policy.lr"] == "0.001"
    assert [each.path for each in client.list_artifacts(one.info.run_id)] == ["rollouts"]
    history = {name: client.get_metric_history(one.info.run_id, name) for name in one.data.metrics}
    return {name: [(each.step, each.value) for each in found] for name, found in history.items()}


CASES = [
    pytest.param("wandb", 'project = "sums"\nmode = "offline"', wandb_scalars, id="wandb"),
    pytest.param("tensorboard", "", tensorboard_scalars, id="tensorboard"),
    pytest.param(
        "mlflow", 'experiment = "sums"\nuri = "sqlite:///FOLDER/mlflow.db"', mlflow_scalars, id="mlflow"
    ),
]


def written(tiny: Tiny, name: str, settings: str) -> None:
    pytest.importorskip(name, exc_type=ImportError)
    rest = REST.replace("NAME", name).replace("SETTINGS", settings).replace("FOLDER", str(tiny.folder))
    tiny.write(rest)


def losses(tiny: Tiny) -> list[tuple[int, Any]]:
    lines = tiny.lines("run")
    return [(line["step"], pytest.approx(line["metrics"][LOSS]["mean"], rel=1e-6)) for line in lines]


@pytest.mark.parametrize(("name", "settings", "scalars"), CASES)
def test_a_run_and_its_resume_are_one_run_of_the_tracker(
    tiny: Tiny,
    name: str,
    settings: str,
    scalars: Callable[[Path], Scalars],
    capsys: pytest.CaptureFixture[str],
) -> None:
    written(tiny, name, settings)
    assert tiny.run("run") == 0
    assert tiny.run("run", "algorithm.steps=3") == 0
    assert f"tracker {name}:" not in capsys.readouterr().out
    found = scalars(tiny.folder / "run")
    assert found[LOSS] == losses(tiny) and len(found[LOSS]) == 3
    names = {
        key
        for line in tiny.lines("run")
        for key, parts in line["metrics"].items()
        if "histogram" not in parts
    }
    assert names <= found.keys(), names - found.keys()
    assert [step for step, _ in found["evaluation/accuracy"]] == [0, 2, 3]


@pytest.mark.parametrize(("name", "settings", "scalars"), CASES)
def test_a_finished_run_is_exported(
    tiny: Tiny,
    name: str,
    settings: str,
    scalars: Callable[[Path], Scalars],
    capsys: pytest.CaptureFixture[str],
) -> None:
    written(tiny, name, settings)
    assert tiny.run("run", "run.trackers=none") == 0
    words = [
        f"--set={line.replace(' ', '').replace('FOLDER', str(tiny.folder))}" for line in settings.splitlines()
    ]
    for _ in range(2):
        assert main(["track", str(tiny.folder / "run"), name, "--set=samples=1", *words]) == 0
    assert f"tracker {name}: it has the steps up to 2, as before" in capsys.readouterr().out
    found = scalars(tiny.folder / "run")
    assert found[LOSS] == losses(tiny)


def test_tags_and_names_longer_than_wandb_takes_are_cut(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    long = "-".join(f"part{n}" for n in range(30))
    written(tiny, "wandb", f'project = "sums"\nmode = "offline"\nname = "{long}"\ngroup = "{long}"')
    assert tiny.run("run", f'run.tags=["{long}","short"]') == 0
    assert "not sent" not in capsys.readouterr().out
    (file,) = (tiny.folder / "run/trackers/wandb").glob("offline-run-*/*.wandb")
    records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file)]
    (run,) = (record.run for record in records if record.HasField("run"))
    assert [len(tag) for tag in sorted(run.tags)] == [64, 5]
    assert len(run.display_name) == len(run.run_group) == 128
    assert run.display_name.startswith("part0-part1") and run.display_name.endswith("part28-part29")


def test_wandb_without_a_key_is_told_by_check_and_run_and_the_run_goes_on(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tiny, "wandb", 'project = "sums"')
    assert main(["check", str(tiny.recipe), "--dir", str(tiny.folder / "run")]) == 0
    assert (
        "note: Weights & Biases has no API key, so nothing is sent: run `wandb login`"
        in capsys.readouterr().out
    )
    assert tiny.run("run") == 0
    said = capsys.readouterr().out
    assert "tracker wandb: Weights & Biases has no API key" in said
    assert "tracker wandb: 2 steps and 2 evaluations were not sent; rillflow track" in said
    assert main(["track", str(tiny.folder / "run"), "wandb", "--set=mode=offline"]) == 0
    assert wandb_scalars(tiny.folder / "run")[LOSS] == losses(tiny)


@pytest.mark.parametrize("server", ["http://127.0.0.1:9"])
def test_servers_that_are_down_cost_the_run_its_wait(
    tiny: Tiny, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", exc_type=ImportError)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", server)
    tiny.write(
        f'steps = 2\n{SUMS}\n[run.trackers.wandb]\nproject = "x"\nwait_s = 5\n'
        f'[run.trackers.mlflow]\nuri = "{server}"\nwait_s = 5\n'
    )
    assert tiny.run("run") == 0
    said = capsys.readouterr().out
    for name in ("wandb", "mlflow"):
        assert f"tracker {name}: 2 steps and 2 evaluations were not sent within 5 s" in said, said
    assert len(tiny.lines("run")) == 2
