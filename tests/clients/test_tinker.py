"""The tinker client and tinker-cookbook's programs, unmodified, against ``rillflow serve --train``.

A folder has a model of the name that a recipe asks for, and data sets of the names that it loads, in their
formats; the programs run in it, offline. The model has 2 layers and a token for each byte.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

tinker = pytest.importorskip("tinker")
pytest.importorskip("rillflow_training_service")

types = tinker.types
MODEL = "Qwen/Qwen3-8B"
"""Name that the recipes know; the model itself is small."""
TOKEN = "a-token-of-the-client-tests"
ROWS = 160
COOKBOOK = find_spec("tinker_cookbook") is not None and find_spec("tinker_cookbook.recipes") is not None
needs_cookbook = pytest.mark.skipif(not COOKBOOK, reason="tinker-cookbook is not installed")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running ``rillflow serve --train``."""

    folder: Path
    """Folder with the model and the data sets."""
    url: str
    """Its address."""

    def service(self) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key=f"tml-{TOKEN}")

    def program(self, module: str, *settings: str, limit_s: float = 300) -> dict[str, list[float]]:
        """Run a program of the cookbook; return what it logged, by metric."""
        log = self.folder / "logs" / module
        environment = {
            **os.environ,
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": f"tml-{TOKEN}",
            "HF_HUB_OFFLINE": "1",
        }
        words = [sys.executable, "-m", f"tinker_cookbook.{module}", f"log_path={log}", *settings]
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=limit_s
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        steps = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
        names = {name for step in steps for name in step}
        return {name: [step[name] for step in steps if name in step] for name in names}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("cookbook")
    write_model(folder / MODEL)
    write_data(folder)
    (folder / "token").write_text(TOKEN)
    words = ["serve", MODEL, "--train", "--port", "0", "--token-file", "token", "--max-rows", "32"]
    command = [sys.executable, "-m", "rillflow.cli.main", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield Server(folder=folder, url=line.split()[1])
        process.terminate()


def write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data(folder: Path) -> None:
    def write(name: str, rows: Sequence[dict[str, Any]]) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def configured(name: str, config: str, **files: str) -> None:
        lines = "".join(f"  - split: {split}\n    path: {file}\n" for split, file in files.items())
        (folder / name / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{lines}---\n"
        )

    talks = [
        {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}"}]}
        for i in range(ROWS)
    ]
    sums = [{"question": f"What is {i}+1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(16)]
    pairs = [
        {
            "chosen": f"\n\nHuman: Hello {i}\n\nAssistant: Good day to you",
            "rejected": f"\n\nHuman: Hello {i}\n\nAssistant: Go away",
        }
        for i in range(16)
    ]
    lines = [
        {"text": f"Line {i} of a page until the end, before or after it, because of it."} for i in range(400)
    ]
    for split in ("train", "test"):
        write(f"HuggingFaceH4/no_robots/{split}.jsonl", talks)
        write(f"openai/gsm8k/main/{split}.jsonl", sums)
        write(f"Anthropic/hh-rlhf/{split}.jsonl", pairs)
    write("Salesforce/wikitext/train.jsonl", lines)
    configured("openai/gsm8k", "main", train="main/train.jsonl", test="main/test.jsonl")
    configured("Salesforce/wikitext", "wikitext-103-raw-v1", train="train.jsonl")


@needs_cookbook
def test_sl_loop(server: Server) -> None:
    settings = (f"model_name={MODEL}", "batch_size=32", "max_steps=4", "lora_rank=4", "learning_rate=0.02")
    found = server.program("recipes.sl_loop", *settings)
    losses = found["train_mean_nll"]
    assert len(losses) == 4 and losses[-1] < losses[0]


@needs_cookbook
def test_rl_loop(server: Server) -> None:
    settings = ("batch_size=4", "group_size=4", "max_steps=2", "lora_rank=4", "max_tokens=16")
    found = server.program("recipes.rl_loop", f"model_name={MODEL}", *settings, "loss_fn=importance_sampling")
    assert found["progress/batch"] == [0, 1]


@needs_cookbook
def test_preference_dpo(server: Server) -> None:
    settings = ("batch_size=8", "max_steps=2", "max_length=512", "renderer_name=role_colon")
    found = server.program("recipes.preference.dpo.train", f"model_name={MODEL}", *settings)
    assert found["dpo_loss"][0] == pytest.approx(math.log(2), rel=1e-3)


@pytest.mark.slow
@needs_cookbook
def test_sl_basic(server: Server) -> None:
    found = server.program("recipes.sl_basic", f"model_name={MODEL}", "max_steps=1", "lora_rank=4")
    assert found["train_mean_nll"][0] > 0


@pytest.mark.slow
@needs_cookbook
def test_rl_basic(server: Server) -> None:
    builder = {
        "": "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
        ".batch_size": "4",
        ".group_size": "4",
        ".renderer_name": "qwen3_disable_thinking",
        ".model_name_for_tokenizer": MODEL,
    }
    settings = [f"dataset_builder{name}={value}" for name, value in builder.items()]
    found = server.program(
        "recipes.rl_basic", f"model_name={MODEL}", *settings, "max_steps=1", "lora_rank=4", "max_tokens=16"
    )
    assert found["tokens/sampled"][0] > 0


@pytest.mark.slow
@needs_cookbook
def test_rl_numerics_check(server: Server) -> None:
    """It compares the sampler's log probabilities with the trainer's."""
    sizes = ("task.page_chars=100", "task.num_pages_min=2", "task.num_pages_max=2", "max_tokens=16")
    found = server.program(
        "recipes.rl_numerics_check.train",
        f"model_name={MODEL}",
        "renderer_name=qwen3_disable_thinking",
        *("group_size=2", "groups_per_batch=2", "max_steps=1", "lora_rank=4", *sizes),
    )
    assert abs(found["optim/kl_sample_train_v2"][0]) < 1e-9


@needs_cookbook
@pytest.mark.slow
def test_preference_shorter(server: Server) -> None:
    found = server.program(
        "recipes.preference.shorter.train",
        f"model_name={MODEL}",
        "renderer_name=qwen3_disable_thinking",
        *("batch_size=2", "group_size=4", "max_steps=1", "max_tokens=16", "eval_every=0"),
    )
    assert found["tokens/sampled"][0] > 0


def row(tokens: Sequence[int], prompt: int) -> Any:
    weights = [float(at >= prompt) for at in range(1, len(tokens))]
    return types.Datum(
        model_input=types.ModelInput.from_ints([*tokens[:-1]]),
        loss_fn_inputs={"target_tokens": [*tokens[1:]], "weights": weights},
    )


ADAM = types.AdamParams(learning_rate=0.02)


def program(server: Server, seed: int) -> list[Any]:
    """Train, sample and train on the samples; return every number that the service answered."""
    service, found = server.service(), list[Any]()
    client = service.create_lora_training_client(base_model=MODEL, rank=4 + seed % 2, seed=seed).result()
    prompt = [5 + seed, 20, 30]
    for _ in range(2):
        passed = client.forward_backward([row([*prompt, 40 + at, 50], 3) for at in range(3)], "cross_entropy")
        stepped = client.optim_step(ADAM)
        found += [passed.result().metrics["loss:sum"], stepped.result().metrics]
        sampler = client.save_weights_and_get_sampling_client().result()
        futures = [
            sampler.sample(types.ModelInput.from_ints([*prompt, at]), 3, types.SamplingParams(max_tokens=6))
            for at in range(4)
        ]
        samples = [each for future in futures for each in future.result().sequences]
        found += [(each.tokens, each.logprobs) for each in samples]
        data = [reinforced([*prompt, at // 3], each, 1.0 - at % 3) for at, each in enumerate(samples)]
        passed, stepped = client.forward_backward(data, "importance_sampling"), client.optim_step(ADAM)
        outputs = passed.result().loss_fn_outputs
        found += [each["logprobs"].data for each in outputs] + [stepped.result().metrics]
    service.close("success").result()
    return [each if isinstance(each, tuple | dict | float) else list(each) for each in found]


def reinforced(prompt: Sequence[int], sample: Any, advantage: float) -> Any:
    tokens, before = [*prompt, *sample.tokens], len(prompt) - 1
    rest = len(tokens) - 1 - before
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * before + [*sample.logprobs],
        "advantages": [0.0] * before + [advantage] * rest,
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_four_clients_at_once_get_what_each_gets_alone(server: Server) -> None:
    alone = [program(server, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda seed: program(server, seed), range(4)))
    assert together == alone
    assert alone[0] != alone[2]


def test_custom_losses_and_checkpoints(server: Server) -> None:
    service = server.service()
    client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    data = [row([5, 6, 7, 8], 2)]

    def negative(rows: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        del rows
        return -sum(each[1:].sum() for each in logprobs), {"own": 1.0}

    custom = client.forward_backward_custom(data, negative).result().metrics
    plain = client.forward_backward(data, "cross_entropy").result().metrics
    assert custom["own"] == 1.0 and custom["loss:sum"] == pytest.approx(plain["loss:sum"], rel=1e-6)
    client.optim_step(ADAM).result()
    saved = client.save_state("one").result().path
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    steps = [
        each.forward_backward(data, "cross_entropy").result().metrics["loss:sum"] for each in (client, again)
    ]
    assert steps[0] == steps[1]
    rest = tinker.RestClient(base_url=server.url, api_key=f"tml-{TOKEN}")
    assert saved in [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]
    assert rest.get_weights_info_by_tinker_path(saved).result().lora_rank == 4
    sampler = service.create_sampling_client(model_path=client.save_weights_for_sampler("s").result().path)
    scored = sampler.result().compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()
    assert scored[0] is None and -sum(scored[2:]) == pytest.approx(steps[0], rel=1e-5)
    texts = client.get_tokenizer().encode("Hi")
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [odd("weights", [math.nan, 1.0])], "weights of datum 0 is nan"),
        (lambda: [odd("target_tokens", [6, 99999])], "the token 99999"),
        (lambda: [odd("weights", [1.0])], "has the shape [1]"),
        (lambda: [row([5] * 5000, 1)], "the model's context is 4096"),
    ],
)
def test_odd_data_raise_request_failed(server: Server, make: Callable[[], list[Any]], words: str) -> None:
    client = server.service().create_lora_training_client(base_model=MODEL, rank=2).result()
    passed, stepped = client.forward_backward(make(), "cross_entropy"), client.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError) as refused:
        passed.result(60)
    assert words in str(refused.value)
    with pytest.raises(tinker.RequestFailedError, match="was not applied"):
        stepped.result(60)


def odd(name: str, values: list[Any]) -> Any:
    inputs = {"target_tokens": [6, 7], "weights": [1.0, 1.0], name: values}
    return types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs=inputs)


def test_odd_parameters_losses_and_models(server: Server) -> None:
    service = server.service()
    client = service.create_lora_training_client(base_model=MODEL, rank=2).result()
    for loss, words in (("magic", "there is no loss"), ("stable_reinforce", "not published")):
        with pytest.raises(tinker.RequestFailedError, match=words):
            client.forward_backward([row([5, 6], 1)], loss).result(60)
    with pytest.raises(tinker.RequestFailedError, match="was not applied"):
        client.optim_step(ADAM).result(60)
    for name in ("learning_rate", "eps"):
        with pytest.raises(tinker.RequestFailedError, match=f"{name} is nan"):
            client.optim_step(types.AdamParams(**{name: math.nan})).result(60)
    with pytest.raises(tinker.RequestFailedError, match="there is no base model"):
        service.create_lora_training_client(base_model="other/model").result(60)
    with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
        service.create_training_client_from_state("tinker://a/weights/b").result(60)


def test_a_long_request_is_polled(server: Server) -> None:
    """Three rows of 4,000 tokens take longer than nothing; the client only waits."""
    sampler = server.service().create_sampling_client(base_model=MODEL).result()
    started = time.monotonic()
    params = types.SamplingParams(max_tokens=600, stop=[], seed=3)
    found = sampler.sample(types.ModelInput.from_ints([5]), 2, params).result()
    assert [len(each.tokens) for each in found.sequences] == [600, 600]
    again = sampler.sample(types.ModelInput.from_ints([5]), 2, params).result()
    assert [each.tokens for each in again.sequences] == [each.tokens for each in found.sequences]
    assert time.monotonic() - started < 300
