"""Two engines outside Rillflow train a policy through the service; they know only its HTTP paths.

    python examples/foreign_engines.py

    this process ── prompts ──> service ──> sampler: numpy, a process; samples with the newest weights
                                 │  ^ └────── answers, rewards ───────┘
                                 v  └── weights ── trainer: a plain PyTorch loop, another process

A prompt is a digit; an answer is right if it is the next digit. The policy is a table of logits. The mean
reward of every step is printed and rises from 0.1. The processes communicate over HTTP only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rillflow_service.http_client import ServiceClient

DIGITS, PROMPTS, SAMPLES, STEPS = 10, 10, 8, 60
COLUMNS = {
    "prompt": {"dtype": "int64", "per": "group"},
    "answer": {"dtype": "int64", "least": 0, "most": DIGITS - 1},
    "reward": {"dtype": "float32", "finite": True},
}
STAGES = [
    {"name": "sample", "reads": ["prompt"], "writes": ["answer", "reward"]},
    {"name": "train", "reads": ["prompt", "answer", "reward"], "order": "in_order"},
]


def sample(folder: Path) -> None:
    """Run an inference engine: answer prompts until the end of the stream."""
    service, draw = ServiceClient(folder, name="sampler"), np.random.default_rng(1)
    found = service.get_weights(wait_s=60)
    assert found is not None, "the trainer publishes what it starts with"
    version, weights = found
    while (taken := service.take("rollouts", "sample", PROMPTS)) is not None:
        if newer := service.get_weights(newer_than=version, wait_s=0):
            version, weights = newer
        prompt = taken.columns["prompt"]
        assert isinstance(prompt, np.ndarray)
        asked = np.repeat(prompt, taken.rows)
        noise = draw.gumbel(size=(len(asked), DIGITS))
        answer = (weights["logits"][asked] + noise).argmax(axis=1)
        reward = (answer == (asked + 1) % DIGITS).astype(np.float32)
        service.done(taken, {"answer": answer, "reward": reward}, version=version)


def train(folder: Path) -> None:
    """Run a trainer: policy gradient with the group's mean as baseline."""
    import torch

    service = ServiceClient(folder, name="trainer")
    logits = torch.zeros(DIGITS, DIGITS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    step = 0
    service.put_weights(0, {"logits": logits.detach().numpy()})
    while (taken := service.take("rollouts", "train", PROMPTS, least=PROMPTS)) is not None:
        prompt, answer, reward = (
            torch.from_numpy(taken.columns[name]) for name in ("prompt", "answer", "reward")
        )
        rows = reward.view(PROMPTS, SAMPLES)
        advantage = (rows - rows.mean(dim=1, keepdim=True)).flatten()
        logprob = logits.log_softmax(dim=1)[prompt.repeat_interleave(SAMPLES), answer]
        loss = -(advantage * logprob).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        service.done(taken)
        print(json.dumps({"step": step, "reward": float(reward.mean())}), flush=True)
        step += 1
        service.put_weights(step, {"logits": logits.detach().numpy()})


def main() -> None:
    """Start the service and both engines, and send the prompts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [subprocess.Popen([sys.executable, "-m", "rillflow_service", name])]
        try:
            until = time.monotonic() + 60.0
            while not (folder / "socket").exists():
                if processes[0].poll() is not None or time.monotonic() > until:
                    raise SystemExit("the service did not start: pip install ./plugins/service")
                time.sleep(0.02)
            service = ServiceClient(folder, name="task")
            service.create("rollouts", columns=COLUMNS, stages=STAGES, capacity=2 * PROMPTS)
            processes += [
                subprocess.Popen([sys.executable, __file__, role, name]) for role in ("sample", "train")
            ]
            for _ in range(STEPS):  # waits while two steps are in flight: the freshness bound
                service.begin("rollouts", {"prompt": np.arange(PROMPTS)}, rows=[SAMPLES] * PROMPTS)
            service.close("rollouts")
            if any(process.wait(120.0) for process in processes[1:]):
                raise SystemExit("an engine failed")
        finally:
            for process in processes:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["sample"]:
        sample(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]))
    else:
        main()
