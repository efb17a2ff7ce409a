"""`rillflow serve`: a run's newest policy, queried by OpenAI's client from its own process."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("openai", reason="a tool of the tests")
pytest.importorskip("uvicorn", reason="the door is the extra `service`")

import openai

from rillflow.app.sections import Recipe
from rillflow.config.load import validate
from rillflow.controller.checkpoint import save_checkpoint
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow.runs.run_directory import RunDirectory

NEW = NewModel(hidden=32, layers=2, heads=4, kv_heads=2, context=64, alphabet="0123456789+=")


def saved(seed: int) -> Callable[[Path], dict[str, Any]]:
    model = load_model(ModelConfig(new=NEW), seed=seed, device=torch.device("cpu"), base=Path())
    return lambda folder: save_model(model, folder / "policy") or {}


@pytest.mark.slow
def test_a_run_is_served_and_followed(tmp_path: Path) -> None:
    data = {
        "policy": {"model": {"new": NEW.model_dump()}},
        "rollout": {"max_tokens": 6},
        "algorithm": {"name": "grpo", "steps": 4},
    }
    recipe = validate(Recipe, data, "recipe")
    command = [sys.executable, "-m", "rillflow.cli.main", "serve", str(tmp_path / "run"), "--port", "0"]
    with RunDirectory.open(tmp_path / "run", recipe.model_dump(mode="json")) as directory:
        save_checkpoint(directory.checkpoints, 2, saved(2), {}, keep=5)
        process = subprocess.Popen(
            [*command, "--token-file", str(tmp_path / "token")], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        first = process.stdout.readline().decode()
        found = re.search(r"run, step 2: (http://127\.0\.0\.1:\d+/v1)", first)
        assert found is not None, first
        assert process.stdout.readline().decode() == f"token: written to {tmp_path / 'token'}\n"
        assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
        client = openai.OpenAI(base_url=found[1], api_key=(tmp_path / "token").read_text())
        try:
            assert [each.id for each in client.models.list()] == ["run"]
            more = {"return_token_ids": True}
            said = client.completions.create(model="run", prompt="1+2=", logprobs=0, extra_body=more)
            assert said.system_fingerprint == "version 2" and said.usage.completion_tokens <= 6
            assert len(said.choices[0].token_ids) == len(said.choices[0].logprobs.token_logprobs)
            with pytest.raises(openai.BadRequestError, match="the model has no chat template"):
                client.chat.completions.create(model="run", messages=[{"role": "user", "content": "1"}])
            with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
                client.with_options(api_key="another").models.list()
            greedy = {"model": "run", "prompt": "1+2=", "temperature": 0, "logprobs": 0}
            before = client.completions.create(**greedy)
            save_checkpoint(directory.checkpoints, 4, saved(4), {}, keep=5)
            until = time.monotonic() + 60
            while (after := client.completions.create(**greedy)) and (
                after.system_fingerprint == "version 2" and time.monotonic() < until
            ):
                time.sleep(0.2)
            assert after.system_fingerprint == "version 4"
            assert after.choices[0].logprobs.token_logprobs != before.choices[0].logprobs.token_logprobs
            stream = client.completions.create(**greedy, stream=True)
            assert "".join(each.choices[0].text for each in stream) == after.choices[0].text
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.slow
def test_an_engine_that_breaks_closes_the_door_and_the_command_fails(tmp_path: Path) -> None:
    data = {
        "policy": {"model": {"new": NEW.model_dump()}},
        "rollout": {"max_tokens": 6},
        "algorithm": {"name": "grpo", "steps": 4},
    }
    recipe = validate(Recipe, data, "recipe")
    wider = load_model(
        ModelConfig(new=NEW.model_copy(update={"hidden": 64})),
        seed=0,
        device=torch.device("cpu"),
        base=Path(),
    )
    command = [sys.executable, "-m", "rillflow.cli.main", "serve", str(tmp_path / "run"), "--port", "0"]
    with RunDirectory.open(tmp_path / "run", recipe.model_dump(mode="json")) as directory:
        save_checkpoint(directory.checkpoints, 2, saved(2), {}, keep=5)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert "step 2: http" in process.stdout.readline()
        save_checkpoint(
            directory.checkpoints, 4, lambda folder: save_model(wider, folder / "policy") or {}, {}, keep=5
        )
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "error: the engine failed, and the server stopped\n  why: RuntimeError: " in said
