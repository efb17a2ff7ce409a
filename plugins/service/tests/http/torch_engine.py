"""A rollout engine as another project would write it: it knows HTTP and torch, and nothing of Rillflow.

python torch_engine.py RUN/service/main-0.json [--lie RULE]      sample until the run has ended
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM


class Run:
    """The HTTP paths of a run."""

    def __init__(self, address: Path, name: str) -> None:
        until = time.monotonic() + 60.0
        while not address.exists():
            assert time.monotonic() < until, "the run has written no address"
            time.sleep(0.05)
        found = json.loads(address.read_text())
        self._url = found["url"]
        self._headers = {"authorization": f"Bearer {found['token']}", "x-rillflow-client": name}

    def ask(self, path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, self._headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: bytes = answer.read()
        return found


class Model:
    """The decoder of ``/v1/model`` with the newest weights."""

    def __init__(self, run: Run) -> None:
        self._run, self.about, self.version = run, json.loads(run.ask("model")), -1
        config = dict(self.about["config"])
        kind = config.pop("model_type")
        self._module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()

    def load(self) -> None:
        found = self._run.ask(f"weights?newer_than={self.version}&wait_s=0")
        if not found:
            return
        manifest, weights = json.loads(found), {}
        for file in manifest["files"]:
            data = self._run.ask(f"weights/{manifest['version']}/{file['name']}")
            assert hashlib.sha256(data).hexdigest() == file["sha256"]
            weights |= safetensors.torch.load(data)
        missing, odd = self._module.load_state_dict(weights, strict=False)
        assert not odd and set(missing) <= {"lm_head.weight"}
        self.version = manifest["version"]

    @torch.inference_mode()
    def sample(self, row: dict[str, Any]) -> dict[str, Any]:
        tokens, logprobs, stops = list(row["tokens"]), [], self.about["stop_tokens"]
        begin, draw = len(tokens), torch.Generator().manual_seed(row["seed"])
        while len(logprobs) < row["max_tokens"] and (not logprobs or tokens[-1] not in stops):
            logits = self._module(input_ids=torch.tensor([tokens])).logits[0, -1].float()
            told = (logits / (row["temperature"] or 1.0)).log_softmax(-1)
            token = int(
                told.argmax() if not row["temperature"] else torch.multinomial(told.exp(), 1, generator=draw)
            )
            tokens.append(token)
            logprobs.append(float(told[token]))
        finish = "stop" if tokens[-1] in stops else "length"
        own = {"tokens": tokens[begin:], "logprobs": logprobs, "finish": finish}
        return {"row": row["row"], "version": self.version, **own}


def main() -> None:
    torch.set_num_threads(1)
    address, name = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "torch engine"
    run = Run(address, name)
    model = Model(run)
    while True:
        try:
            taken = run.ask("rows/take", {"count": 64, "wait_s": 10})
            if not taken:
                continue
            found = json.loads(taken)
            model.load()
            rows = [model.sample(row) for row in found["rows"]]
            run.ask("rows/put", {"lease": found["lease"], "rows": rows})
        except urllib.error.HTTPError as error:
            if error.code != 409:  # the rows went back to the run
                raise SystemExit(f"{error.code} {error.read().decode()}") from None
        except OSError as error:
            raise SystemExit(f"the run has gone: {error}") from None


if __name__ == "__main__":
    main()
