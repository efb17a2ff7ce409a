"""lm-eval, unmodified, by its command: likelihoods over /v1/completions, answers over /v1/chat/completions.

Its own reading of the same model through transformers is what the likelihoods are compared with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

pytestmark = pytest.mark.timeout(1200)  # each command imports torch and lm-eval anew
CHOICES = """
task: sums_choice
dataset_path: json
dataset_kwargs: { data_files: { test: DATA } }
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["42", "7", "It is 25."]
doc_to_target: "{{label}}"
metric_list: [{ metric: acc }]
"""
ANSWERS = """
task: sums_answer
dataset_path: json
dataset_kwargs: { data_files: { test: DATA } }
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "I think {{answer}}."
generation_kwargs: { until: ["\\n\\n"], max_gen_toks: 16, temperature: 0 }
metric_list: [{ metric: exact_match, aggregation: mean, higher_is_better: true }]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two tasks on a local file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": "17+25", "label": 0, "answer": 42}, {"question": "3+4", "label": 1, "answer": 7}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICES), ("answer", ANSWERS)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "rows.jsonl")))
    return folder


def evaluated(
    task: str, tasks: Path, out: Path, *words: str, key: str = ""
) -> tuple[dict[str, Any], list[Any]]:
    """Run lm-eval's command; return its results and what it logged of each sample."""
    command = [sys.executable, "-m", "lm_eval", "run", "--tasks", task, "--include_path", str(tasks), *words]
    said = subprocess.run(
        [*command, "--output_path", str(out), "--log_samples"],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert said.returncode == 0, said.stdout + said.stderr
    (results,), (samples,) = (sorted(out.rglob(f"{name}_*.json*")) for name in ("results", "samples"))
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"][task], lines


def test_likelihoods_equal_those_of_transformers(served: Any, tasks: Path, tmp_path: Path) -> None:
    at = f"model={served.model},base_url={served.url}/completions"
    there = f"{at},tokenizer={served.directory},num_concurrent=3"
    words = ["--model", "local-completions", "--model_args", there, "--batch_size", "2"]
    score, ours = evaluated("sums_choice", tasks, tmp_path / "ours", *words, key=served.token)
    here = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={served.directory},dtype=float32",
        "--device",
        "cpu",
    ]
    same, theirs = evaluated("sums_choice", tasks, tmp_path / "theirs", *here)
    assert score["acc,none"] == same["acc,none"]
    for mine, other in zip(ours, theirs, strict=True):
        for (logprob, is_greedy), (wanted, was_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(logprob) == pytest.approx(float(wanted), abs=1e-3)
            assert str(is_greedy) == str(was_greedy)


def test_answers_of_chats_and_texts(served: Any, tasks: Path, tmp_path: Path) -> None:
    at = f"model={served.model},base_url={served.url}/chat/completions"
    words = ["--model", "local-chat-completions", "--model_args", at, "--apply_chat_template"]
    score, _ = evaluated("sums_answer", tasks, tmp_path / "chats", *words, key=served.token)
    assert score["exact_match,none"] == 1.0
    at = f"model={served.model},base_url={served.url}/completions,tokenizer={served.directory}"
    words = ["--model", "local-completions", "--model_args", at]
    _, lines = evaluated("sums_answer", tasks, tmp_path / "texts", *words, key=served.token)
    assert len(lines) == 2 and all(isinstance(line["resps"][0][0], str) for line in lines)
