"""Links between ranks: measured by messages of real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.placement.mesh import Mesh
from rillflow_links.link_times import CUT_BYTES, LinkTime, cut_seconds

RECIPE = """
[task]
source = "arithmetic"
digits = 1
[policy.model.new]
hidden = 16
layers = 3
context = 16
[rollout]
max_tokens = 3
[algorithm]
name = "sft"
steps = 1
[placement]
backend = "process"
pools.main = 3
train_parallel.main.pp = 3
"""


def test_the_command_measures_every_pair_and_writes_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    assert main(["links", str(tmp_path / "run.toml")]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"main  (\d - \d)", said) == ["0 - 1", "0 - 2", "1 - 2"]
    setting = re.search(r"link_seconds = \[(.*)\]", said)
    assert setting is not None and all(0 < float(each) < 60 for each in setting[1].split(", "))
    assert len(setting[1].split(", ")) == 2
    given = f"links.link_seconds=[{setting[1]}]"
    words = ["check", str(tmp_path / "run.toml"), "--set", "links.activations=adatopk", "--set", given]
    assert main(words) == 0
    assert "of a token's 16 values cross a cut" in capsys.readouterr().out


def test_ranks_of_one_process_have_no_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RECIPE.partition("[placement]")[0])
    assert main(["links", str(tmp_path / "run.toml")]) == 2
    assert "no two ranks of a pool are processes" in capsys.readouterr().err


def test_a_cut_takes_as_long_as_its_slowest_link() -> None:
    def link(one: int, other: int, seconds: float) -> LinkTime:
        return LinkTime(pool="main", ranks=(one, other), latency_s=0.0, bytes_per_s=CUT_BYTES / seconds)

    links = [link(0, 1, 1.0), link(1, 2, 2.0), link(3, 4, 4.0), link(4, 5, 0.5), link(2, 3, 9.0)]
    assert cut_seconds(links, "main", Mesh.of(dp=2, pp=3)) == pytest.approx([4.0, 2.0])
