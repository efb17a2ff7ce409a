"""A run keeps the checkpoints that other runs stand on; these find their base, or say what became of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import rillflow
from rillflow.cli.main import main
from rillflow.runs.pins import pins_of
from rillflow.runs.reader import read_metrics
from tests.flows.conftest import SUMS, Tiny
from tests.flows.test_preference import POLICY as SCORED
from tests.flows.test_preference import RECIPE as SCORER
from tests.flows.whole_runs import numbers, ran

REST = f"steps = 1\n{SUMS}[evaluate]\nproblems = 0\n"
NEWEST = "run.keep_checkpoints=1"
ON_BASE = ("policy.model.new=none", "policy.model.path=base")
ADAPTER = (*ON_BASE, "policy.model.adapter={ rank = 2 }")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained run, which each test copies."""
    tiny = Tiny(tmp_path_factory.mktemp("trained"))
    tiny.write(REST)
    assert tiny.run("base", NEWEST) == 0
    return tiny.folder / "base"


@pytest.fixture
def tiny(tiny: Tiny, trained: Path) -> Tiny:
    """Return a folder with a trained run, base."""
    tiny.write(REST)
    shutil.copytree(trained, tiny.folder / "base")
    return tiny


def train_on(tiny: Tiny, *steps: int) -> None:
    for step in steps:
        assert tiny.run("base", NEWEST, f"algorithm.steps={step}") == 0


def test_a_base_that_trains_on_keeps_what_an_adapter_stands_on(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("child", *ADAPTER) == 0
    capsys.readouterr()
    train_on(tiny, 2, 3)
    assert "base/checkpoints/step-000001 is kept: " in capsys.readouterr().out
    assert tiny.steps_kept("base") == [1, 3]
    assert tiny.run("child", *ADAPTER, "algorithm.steps=2") == 0
    assert "changed: from step 2 on, bases" not in capsys.readouterr().out
    child = tiny.folder / "child"
    assert rillflow.open_run(child).replay().difference is None
    capsys.readouterr()
    assert main(["ask", str(child), "1+1="]) == 0
    assert main(["merge-adapter", str(child), "--out", str(tiny.folder / "merged")]) == 0
    assert main(["verify", str(child)]) == 0
    assert "base/checkpoints/step-000001/policy (policy.model.path)" in capsys.readouterr().out
    assert main(["verify", str(tiny.folder / "base")]) == 0
    said = capsys.readouterr().out
    assert f"step-000001 is kept: {child} began from it" in said


@pytest.mark.slow
def test_a_warm_start_resumes_to_the_bits_of_a_base_that_did_not_train_on(tiny: Tiny) -> None:
    assert tiny.run("whole", *ON_BASE, "algorithm.steps=3") == 0
    assert tiny.run("child", *ON_BASE) == 0
    train_on(tiny, 2, 3)
    assert tiny.run("child", *ON_BASE, "algorithm.steps=3") == 0
    tiny.assert_same("child", "whole")
    assert rillflow.open_run(tiny.folder / "child").replay().difference is None


PPO = 'algorithm={ name = "ppo", prompts_per_step = 4, samples_per_prompt = 2, steps = STEPS }'


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["reward.model", "critic.path"])
def test_a_model_that_scores_stays_the_one_that_the_run_began_with(tmp_path: Path, setting: str) -> None:
    (tmp_path / "scorer.toml").write_text(SCORER)
    (tmp_path / "use.toml").write_text(SCORED)
    steps = "algorithm.steps=STEPS" if setting == "reward.model" else PPO
    words = (f'{setting}="scorer"', "evaluate.problems=0")
    ran(tmp_path / "scorer.toml", "scorer", NEWEST, "algorithm.steps=1")
    whole = ran(tmp_path / "use.toml", "whole", *words, steps.replace("STEPS", "2"))
    child = ran(tmp_path / "use.toml", "child", *words, steps.replace("STEPS", "1"))
    for count in (2, 3):
        ran(tmp_path / "scorer.toml", "scorer", NEWEST, f"algorithm.steps={count}")
    ran(tmp_path / "use.toml", "child", *words, steps.replace("STEPS", "2"))
    assert numbers(child) == numbers(whole)
    assert rillflow.open_run(child).replay().difference is None
    assert main(["verify", str(child)]) == 0
    assert (tmp_path / "scorer/checkpoints/step-000001").is_dir()


@pytest.mark.slow
def test_a_base_under_another_name_is_followed(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("child", *ADAPTER) == 0
    assert tiny.run("warm", *ON_BASE) == 0
    base = tiny.folder / "base"
    words = ["run", str(tiny.recipe), "--dir", str(base), "--set", "run.seed=9", "--fresh"]
    assert main(words) == 0  # another run has this name, and the old one is base.old-1
    for name, more in (("child", ADAPTER), ("warm", ON_BASE)):
        capsys.readouterr()
        assert tiny.run(name, *more, "algorithm.steps=2") == 0
        said = capsys.readouterr().out
        assert "from step 2 on, bases.policy.0.path" in said and "base.old-1" in said
        assert main(["ask", str(tiny.folder / name), "1+1="]) == 0
        assert main(["verify", str(tiny.folder / name)]) == 0
        assert tiny.run(name, *more, "algorithm.steps=3") == 0
        assert rillflow.open_run(tiny.folder / name).replay().difference is None
    assert [pin.child for pin in pins_of(tiny.folder / "base")] == []
    # both folders move together
    moved = tiny.folder / "elsewhere"
    moved.mkdir()
    for name in ("base.old-1", "child"):
        (tiny.folder / name).rename(moved / name)
    capsys.readouterr()
    assert main(["ask", str(moved / "child"), "1+1="]) == 0
    assert main(["verify", str(moved / "child")]) == 0


def test_a_base_that_moved_is_named_with_the_way_out(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert tiny.run("child", *ADAPTER) == 0
    child, away = tiny.folder / "child", tmp_path_factory.mktemp("away") / "kept"
    (tiny.folder / "base").rename(away)
    out = tiny.folder / "merged"
    for words in (
        ["ask", str(child), "1+1="],
        ["merge-adapter", str(child), "--out", str(out)],
        ["replay", str(child)],
        ["run", str(tiny.recipe), "--dir", str(child), *(w for s in ADAPTER for w in ("--set", s))],
        ["check", str(tiny.recipe), "--dir", str(child), *(w for s in ADAPTER for w in ("--set", s))],
    ):
        capsys.readouterr()
        assert main(words) == 2, words
        said = capsys.readouterr().err
        assert f"error: {child} stands on {tiny.folder}/base/checkpoints/step-000001/policy" in said
        assert "which is not there" in said and "--set policy.model.path=PLACE" in said
    assert not out.exists()
    assert main(["verify", str(child)]) == 1
    assert f"damaged  base {tiny.folder}/base/checkpoints/step-000001/policy: " in capsys.readouterr().out
    new = f"policy.model.path={away}"
    assert tiny.run("child", *ADAPTER, new) == 0  # the run is finished, and records the place
    assert main(["ask", str(child), "1+1="]) == 0
    assert tiny.run("child", *ADAPTER, "algorithm.steps=2") == 0
    assert main(["verify", str(child)]) == 0
    assert rillflow.open_run(child).replay().difference is None
    assert [pin.child for pin in pins_of(away)] == [child]


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["run", "policy"])
def test_only_the_same_model_is_accepted_in_another_place(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], copied: str
) -> None:
    assert tiny.run("child", *ADAPTER) == 0
    policy = tiny.folder / "base/checkpoints/step-000001/policy"
    place = tiny.folder / "copies" / "copy"
    shutil.copytree(tiny.folder / "base" if copied == "run" else policy, place)
    shutil.rmtree(tiny.folder / "base")
    other = tiny.folder / "other"
    assert tiny.run("other", "run.seed=9") == 0
    for wrong in (other, other / "checkpoints/step-000001/policy"):
        capsys.readouterr()
        assert tiny.run("child", *ADAPTER, f"policy.model.path={wrong}", "algorithm.steps=2") == 2
        said = capsys.readouterr().err
        assert "another config: policy.model.path: 'base/checkpoints/step-000001/policy' -> " in said
        assert "bases.policy.0.digest: 'sha256:" in said
    assert tiny.run("child", *ADAPTER, f"policy.model.path={place}", "algorithm.steps=2") == 0
    assert tiny.run("child", *ADAPTER, "algorithm.steps=3") == 0
    assert main(["verify", str(tiny.folder / "child")]) == 0


@pytest.mark.slow
def test_another_model_at_the_place_of_the_base_is_refused_by_every_reader(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("child", *ADAPTER) == 0
    child = tiny.folder / "child"
    shutil.rmtree(tiny.folder / "base")
    assert tiny.run("base", NEWEST, "run.seed=9") == 0
    for words in (
        ["ask", str(child), "1+1="],
        ["merge-adapter", str(child), "--out", str(tiny.folder / "merged")],
        ["run", str(tiny.recipe), "--dir", str(child), *(w for s in ADAPTER for w in ("--set", s))],
        ["replay", str(child), "--step", "1"],
    ):
        capsys.readouterr()
        assert main(words) == 2, words
        assert "base/checkpoints/step-000001/policy, and its files have changed" in capsys.readouterr().err


def test_verify_reads_every_byte_of_the_base(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("child", *ADAPTER) == 0
    file = tiny.folder / "base/checkpoints/step-000001/policy/model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["verify", str(tiny.folder / "child")]) == 1
    assert "is not what the run began from: its digest is sha256:" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plain_base_is_known_by_its_digest(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tiny.folder / "plain"
    shutil.copytree(tiny.folder / "base/checkpoints/step-000001/policy", plain)
    on_plain = (*ADAPTER, "policy.model.path=plain")
    assert tiny.run("child", *on_plain) == 0
    (plain / "README.md").write_text("a model")
    assert tiny.run("child", *on_plain, "algorithm.steps=2") == 0
    held = load_file(plain / "model.safetensors")
    name = min(held)
    save_file({**held, name: held[name] + 1e-3}, plain / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert tiny.run("child", *on_plain, "algorithm.steps=3") == 2
    assert f"stands on {plain}, and its files have changed" in capsys.readouterr().err
    assert main(["ask", str(tiny.folder / "child"), "1+1="]) == 2
    assert main(["verify", str(tiny.folder / "child")]) == 1


def test_a_child_that_is_gone_is_named_with_what_frees_its_checkpoint(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("child", *ADAPTER) == 0
    (tiny.folder / "child").rename(tiny.folder / "renamed")
    train_on(tiny, 2)
    assert f"step-000001 is kept: {tiny.folder / 'renamed'} began from it" in capsys.readouterr().out
    shutil.rmtree(tiny.folder / "renamed")
    train_on(tiny, 3)
    pin = pins_of(tiny.folder / "base")[0].file
    said = capsys.readouterr().out
    assert f"is kept for {tiny.folder / 'child'}, which is not there; if that run was deleted" in said
    assert f"remove {pin}" in said
    assert tiny.steps_kept("base") == [1, 3]
    pin.unlink()
    train_on(tiny, 4)
    assert tiny.steps_kept("base") == [4]


def test_a_start_that_is_refused_leaves_no_note(tiny: Tiny) -> None:
    assert tiny.run("child", *ADAPTER, "reward.function=none.py:f") == 2
    assert pins_of(tiny.folder / "base") == []


@pytest.mark.slow
def test_adapters_on_adapters_and_several_children(tiny: Tiny) -> None:
    assert tiny.run("lora", *ADAPTER) == 0
    on_lora = ("policy.model.new=none", "policy.model.path=lora")
    assert tiny.run("again", *on_lora) == 0
    assert tiny.run("later", "policy.model.new=none", "policy.model.path=again") == 0
    train_on(tiny, 2)
    assert tiny.run("second", *ADAPTER) == 0
    train_on(tiny, 3, 4)
    for step in (2, 3):
        assert tiny.run("lora", *ADAPTER, NEWEST, f"algorithm.steps={step}") == 0
        assert tiny.run("again", *on_lora, NEWEST, f"algorithm.steps={step}") == 0
    assert [tiny.steps_kept(name) for name in ("base", "lora", "again")] == [[1, 2, 4], [1, 3], [1, 3]]
    assert tiny.run("later", "policy.model.new=none", "policy.model.path=again", "algorithm.steps=2") == 0
    assert tiny.run("second", *ADAPTER, "algorithm.steps=2") == 0
    for name in ("lora", "again", "later", "second"):
        assert main(["verify", str(tiny.folder / name)]) == 0
        assert main(["ask", str(tiny.folder / name), "1+1="]) == 0
        assert rillflow.open_run(tiny.folder / name).replay().difference is None
    base = json.loads((tiny.folder / "later/checkpoints/step-000002/policy/adapter_config.json").read_text())
    assert base["base_model_name_or_path"] == str(tiny.folder / "base/checkpoints/step-000001/policy")


@pytest.mark.slow
def test_another_folder_and_a_link_name_the_same_base(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny.folder / "newest").symlink_to(tiny.folder / "base")
    linked = (*ADAPTER, "policy.model.path=newest")
    assert tiny.run("child", *linked) == 0
    train_on(tiny, 2, 3)
    assert tiny.steps_kept("base") == [1, 3]
    (tiny.folder / "inner").mkdir()
    for file in ("run.toml", "scores.py"):
        shutil.copy(tiny.folder / file, tiny.folder / "inner" / file)
    monkeypatch.chdir(tiny.folder / "inner")
    words = ["run", "run.toml", "--dir", "../child", *(w for s in linked for w in ("--set", s))]
    words += ["--set", "policy.model.path=../newest", "--set", "algorithm.steps=2"]
    assert main(words) == 0
    assert [each.step for each in read_metrics(tiny.folder / "child")] == [1, 2]


@pytest.fixture
def read_only(tiny: Tiny) -> Iterator[Path]:
    """Yield the base on a file system that is mounted read-only."""
    base = tiny.folder / "base"
    for words in (["--bind", str(base), str(base)], ["-o", "remount,ro,bind", str(base)]):
        if os.geteuid() != 0 or subprocess.run(["mount", *words], capture_output=True).returncode:
            pytest.skip("only root may mount")
    yield base
    subprocess.run(["umount", str(base)], check=True)


def test_a_base_that_cannot_be_written_is_told_once(
    tiny: Tiny, read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert tiny.run("child", *ADAPTER) == 0
    said = capsys.readouterr().out
    assert said.count("cannot note that this run stands on its checkpoint step-000001") == 1
    assert "Read-only file system" in said
    assert tiny.run("child", *ADAPTER, "algorithm.steps=2") == 0
    assert main(["verify", str(tiny.folder / "child")]) == 0
    capsys.readouterr()
    assert tiny.run("base", NEWEST, "algorithm.steps=2") == 2
    assert f"the file system of {read_only / 'run.lock'} is mounted read-only" in capsys.readouterr().err
