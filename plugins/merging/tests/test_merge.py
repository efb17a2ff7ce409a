"""Models on the disk made into one: the laws of every method, what is refused, what a killed merge leaves."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rillflow.cli.main import main
from rillflow.errors import ConfigError, ModelError
from rillflow.models import model_files
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import load_model
from rillflow_merging import merge as merging
from rillflow_merging import parents as reading
from rillflow_merging.merge import MergeSettings, merge

sys.path.insert(0, str(Path(__file__).parent))
from conftest import NEW, Made


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def edit(folder: Path, **settings: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def test_a_command_averages_models_into_one_that_loads(make: Made, tmp_path: Path) -> None:
    parents = [make("a", noise=1), make("b", noise=2)]
    out = tmp_path / "out"
    assert main(["merge", *map(str, parents), "--weights", "3,1", "--out", str(out)]) == 0
    one, two, merged = map(weights, (*parents, out))
    for name in one:
        torch.testing.assert_close(merged[name], 0.75 * one[name] + 0.25 * two[name])
    loaded = load_model(ModelConfig(path=str(out)), seed=0, device=torch.device("cpu"), base=Path())
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("1+2=")) == "1+2="
    said = json.loads((out / "merge.json").read_text())
    assert said["method"] == "linear" and said["weights"] == [0.75, 0.25] and said["base"] is None
    file = parents[1] / "model.safetensors"
    assert said["parents"][1] == {
        "path": str(parents[1]),
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest()},
    }


@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "dare"])
def test_equal_parents_are_the_parent_and_a_merge_has_the_same_bits_again(
    make: Made, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also read in other pieces, written in several files."""
    base, a, b = make("base"), make("a", noise=1), make("b", noise=2)
    how = MergeSettings(method=method, density=1.0 if method == "dare" else 0.5, weights=(1, 1, 1))
    needed = base if method != "linear" else None
    merge([a, a, a], tmp_path / "same", how, needed)
    if method != "ties":  # it trims
        same, one = weights(tmp_path / "same"), weights(a)
        assert all(torch.equal(same[name], one[name]) for name in one)
    how = MergeSettings(method=method, weights=(1, 2), seed=3)
    merge([a, b], tmp_path / "one", how, needed)
    merge([a, b], tmp_path / "two", how, needed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]
    for module in (merging, reading):
        monkeypatch.setattr(module, "PIECE", 512)
    monkeypatch.setattr(model_files, "SHARD_BYTES", 8192)
    merge([a, b], tmp_path / "parts", how, needed)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    one, parts = weights(tmp_path / "one"), weights(tmp_path / "parts")
    assert one.keys() == parts.keys()
    for name in one:
        torch.testing.assert_close(parts[name], one[name], rtol=0, atol=1e-7 if method == "slerp" else 0)


def plain_ties(base: torch.Tensor, parents: list[torch.Tensor], density: float) -> torch.Tensor:
    """The paper's algorithm on whole vectors: trim, elect the sign, mean of those that agree."""
    trimmed = []
    for parent in parents:
        change = parent.double() - base.double()
        kept = change.abs().argsort(descending=True)[: math.ceil(density * len(change))]
        trimmed.append(torch.zeros_like(change).index_copy(0, kept, change[kept]))
    changes = torch.stack(trimmed)
    agrees = (changes.sign() == changes.sum(0).sign()) & (changes != 0)
    return base.double() + (changes * agrees).sum(0) / agrees.sum(0).clamp_min(1)


@pytest.mark.parametrize("trim", ["tensor", "model"])
def test_ties_trims_each_tensor_or_the_whole_task_vector(
    make: Made, tmp_path: Path, trim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, a, b, out = make("base"), make("a", noise=1), make("b", noise=2), tmp_path / "out"
    for parent, seed in ((a, 5), (b, 6)):  # the embedding changed ten times as much as the rest
        changed = weights(parent)
        noise = torch.randn(12, 16, generator=torch.Generator().manual_seed(seed))
        changed["model.embed_tokens.weight"][:12] += 0.5 * noise
        save_file(changed, parent / "model.safetensors", {"format": "pt"})
    for module in (merging, reading):
        monkeypatch.setattr(module, "PIECE", 512)
    words = ["--method", "ties", "--base", str(base), "--density", "0.3", "--trim", trim, "--out", str(out)]
    assert main(["merge", str(a), str(b), *words]) == 0
    start, one, two, found = map(weights, (base, a, b, out))
    names = sorted(found)
    cuts = [[name] for name in names] if trim == "tensor" else [names]
    for cut in cuts:
        vectors = [torch.cat([each[name].flatten() for name in cut]) for each in (start, one, two, found)]
        expected = plain_ties(vectors[0], vectors[1:3], 0.3)
        torch.testing.assert_close(vectors[3], expected.float(), rtol=0, atol=1e-7)
    assert json.loads((out / "merge.json").read_text())["trim"] == trim
    name = "model.embed_tokens.weight"
    kept = float((found[name] != start[name])[:12].double().mean())
    assert kept > 0.9 if trim == "model" else 0.3 <= kept < 0.6, "what changed more keeps more of the model's"


def test_slerp_ends_at_its_parents_and_turns_between(make: Made, tmp_path: Path) -> None:
    base, a, b = make("base"), make("a", noise=1), make("b", noise=2)
    for name, shares, end in (("first", (1, 0), a), ("last", (0, 1), b)):
        merge([a, b], tmp_path / name, MergeSettings(method="slerp", weights=shares), base)
        found, expected = weights(tmp_path / name), weights(end)
        for weight in expected:
            torch.testing.assert_close(found[weight], expected[weight], rtol=0, atol=1e-7)
    merge([a, b], tmp_path / "half", MergeSettings(method="slerp"), base)
    start, one, half = weights(base), weights(a), weights(tmp_path / "half")
    name = "model.embed_tokens.weight"
    # The average of two changes at right angles is 0.7 as long as they are; slerp keeps their length.
    assert float((half[name] - start[name]).norm() / (one[name] - start[name]).norm()) == pytest.approx(
        1, abs=0.15
    )


FULL = """
import resource, sys
from rillflow.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))  # no file can grow beyond, as on a disk that is full
sys.exit(main(sys.argv[1:]))
"""


def test_a_merge_that_cannot_be_written_fails_and_leaves_nothing(make: Made, tmp_path: Path) -> None:
    parents, out = [make("a", noise=1), make("b", noise=2)], tmp_path / "out"
    words = [sys.executable, "-c", FULL, "merge", *map(str, parents), "--out", str(out)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert found.returncode != 0, found.stdout
    assert str(out) in found.stderr and "File too large" in found.stderr
    assert "Traceback" not in found.stderr and "wrote" not in found.stdout
    assert not out.exists() and not list(tmp_path.glob(".out*"))


def test_a_half_precision_parent_is_averaged_in_full(make: Made, tmp_path: Path) -> None:
    a, b = make("a", noise=1), make("b", noise=2)
    half = {name: tensor.bfloat16() for name, tensor in weights(a).items()}
    save_file(half, a / "model.safetensors", {"format": "pt"})
    merge([a, b], tmp_path / "mixed", MergeSettings())
    assert {each.dtype for each in weights(tmp_path / "mixed").values()} == {torch.float32}
    merge([a, a], tmp_path / "half", MergeSettings())
    found = weights(tmp_path / "half")
    assert all(torch.equal(found[name], half[name]) for name in half)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def refused(parents: list[Path], out: Path, base: Path | None = None, **how: object) -> str:
    with pytest.raises((ModelError, ConfigError)) as raised:
        merge(parents, out, MergeSettings(**how), base)
    assert not out.exists() and not list(out.parent.glob(".out*"))
    assert raised.value.why
    return str(raised.value)


def test_what_cannot_be_merged_is_refused_with_a_reason(make: Made, tmp_path: Path) -> None:
    a, b, out = make("a", noise=1), make("b", noise=2), tmp_path / "out"
    wide = make("wide", NEW.model_copy(update={"hidden": 32}))
    other = make("other", NEW.model_copy(update={"alphabet": "0123456789+-"}))
    assert "hidden_size is 16" in refused([a, wide], out)
    assert "--method ot" in refused([a, wide], out, base=b, method="slerp")
    assert "decode the token 12 to different text" in refused([a, other], out)
    assert "1 parent to merge" in refused([a], out)
    assert "did you mean 'linear'?" in refused([a, b], out, method="linaer")
    assert "--method ties needs --base" in refused([a, b], out, method="ties")
    assert "--trim is layer, and --method ties" in refused([a, b], out, a, method="ties", trim="layer")
    assert "--trim is model, and --method linear" in refused([a, b], out, trim="model")
    assert "--method linear does not use --base" in refused([a, b], out, base=a)
    assert "--weights has 3 numbers for 2 parents" in refused([a, b], out, weights=(1, 2, 3))
    assert "divided by their sum" in refused([a, b], out, weights=(1, -1))
    assert "--density is 0" in refused([a, b], out, base=a, method="dare", density=0.0)
    assert "is not a model" in refused([a, tmp_path], out)


def test_parents_whose_files_differ_are_refused(make: Made, tmp_path: Path) -> None:
    a, b, out = make("a", noise=1), make("b", noise=2), tmp_path / "out"
    shutil.copytree(b, tmp_path / "untied")
    untied = edit(tmp_path / "untied", tie_word_embeddings=False)
    assert "ties its head to its embedding" in refused([a, untied], out)
    held = weights(b)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**held, name: held[name][:-1].contiguous()}, b / "model.safetensors", {"format": "pt"})
    assert f"{name} has the shape [48, 16]" in refused([a, b], out)
    save_file({key: held[key] for key in held if key != name}, b / "model.safetensors", {"format": "pt"})
    assert f"has {name}, and" in refused([a, b], out)
    held[name][0, :3] = float("nan")
    held[name][1, 0] = float("inf")
    save_file(held, b / "model.safetensors", {"format": "pt"})
    assert f"{name} of {b} has 4 of 768 numbers that are NaN or infinite" in refused([a, b], out)
    save_file({**held, name: held[name].to(torch.int8)}, b / "model.safetensors", {"format": "pt"})
    assert "has the type I8" in refused([a, b], out)
    save_file(weights(a), b / "model.safetensors", {"format": "pt"})
    edit(b, rms_norm_eps=1e-3)
    assert "rms_norm_eps is 1e-06" in refused([a, b], out)


def test_a_directory_that_is_there_stays_as_it_is(make: Made, tmp_path: Path) -> None:
    a, b = make("a", noise=1), make("b", noise=2)
    with pytest.raises(ConfigError, match="exists already"):
        merge([a, b], b, MergeSettings())
    assert (b / "model.safetensors").is_file() and not (b / "merge.json").exists()


def test_a_merge_that_breaks_off_leaves_no_model(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, out = make("a", noise=1), make("b", noise=2), tmp_path / "out"
    (tmp_path / ".out.draft").mkdir()
    (tmp_path / ".out.draft" / "model.safetensors").write_bytes(b"of one that was killed")
    monkeypatch.setattr(merging, "write_merge", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        merge([a, b], out, MergeSettings())
    assert not out.exists() and not list(tmp_path.glob(".out*"))
