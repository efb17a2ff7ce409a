"""The engine compared with plain forward passes and transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from rillflow.errors import RolloutError
from rillflow.formulas.counter import uniform
from rillflow.records.batch import Batch
from rillflow.records.rollout import Finish, Rollout, completions
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.engine import NativeEngine
from tests.unit.records.singles import rollouts_of

Build = Callable[..., nn.Module]
Engines = Callable[..., NativeEngine]
Prompts = Callable[..., Batch]

SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen2": AutoConfig.for_model("qwen2", **SIZE),
    "llama": AutoConfig.for_model("llama", **SIZE),
    "gpt2, learned positions": GPT2Config(vocab_size=64, n_positions=256, n_embd=32, n_layer=2, n_head=4),
    "mistral, a window in every layer": AutoConfig.for_model("mistral", **SIZE, sliding_window=8),
    "qwen2, a window in one layer": AutoConfig.for_model(
        "qwen2", **SIZE, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3, normed heads": AutoConfig.for_model("qwen3", **SIZE, head_dim=8),
    "gpt_neox, parallel blocks": AutoConfig.for_model("gpt_neox", **SIZE),
    "phi, partial rotation": AutoConfig.for_model("phi", **SIZE),
    "deepseek_v3, keys wider than values": AutoConfig.for_model(
        "deepseek_v3",
        **{**SIZE, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
}


def reference_logits(module: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Return [T, V] logits of a plain pass over the whole row."""
    with torch.no_grad():
        logits: Tensor = module(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0].float()


def replayed(module: nn.Module, rollout: Rollout, temperature: float = 1.0) -> list[float]:
    """Return the log probability of every sampled token in a plain pass."""
    logprobs = torch.log_softmax(reference_logits(module, rollout.tokens) / temperature, -1)
    places = [place for place, sampled in enumerate(rollout.loss_mask) if sampled]
    return [float(logprobs[place - 1, rollout.tokens[place]]) for place in places]


def sampled_logprobs(rollout: Rollout) -> list[float]:
    return [value for value, mine in zip(rollout.logprobs, rollout.loss_mask, strict=True) if mine]


def finish_all(engine: NativeEngine) -> dict[RowId, Rollout]:
    ended = {}
    while engine.has_work:
        ended.update((rollout.row, rollout) for rollout in engine.step())
    return ended


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(
    name: str, build: Build, engine: Engines, prompts: Prompts
) -> None:
    module = build(ARCHITECTURES[name])
    theirs = build(ARCHITECTURES[name], attention="eager")
    theirs.load_state_dict(module.state_dict())
    batch = prompts(1, 5, 9, 5, 14)
    rollouts = rollouts_of(engine(module, temperature=0.0, max_tokens=16, max_rows=3).generate(batch))
    for rollout, prompt in zip(rollouts, batch.ragged("tokens").rows(), strict=True):
        said = theirs.generate(  # type: ignore[operator]
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert rollout.tokens == tuple(said.sequences[0].tolist())
        wanted = torch.log_softmax(torch.cat(said.logits).float(), -1).max(-1).values
        assert torch.allclose(torch.tensor(sampled_logprobs(rollout)), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", ["qwen2", "mistral, a window in every layer", "gpt2, learned positions"])
def test_logprobs_are_those_of_a_whole_pass(
    name: str, temperature: float, build: Build, engine: Engines, prompts: Prompts
) -> None:
    module = build(ARCHITECTURES[name])
    rollouts = engine(module, temperature=temperature, max_tokens=20, max_rows=4, stop_tokens=[5]).generate(
        prompts(1, 7, 30, 7, 2, 12), samples=2
    )
    for rollout in rollouts_of(rollouts):
        wanted = replayed(module, rollout, temperature or 1.0)
        assert sampled_logprobs(rollout) == pytest.approx(wanted, abs=1e-5)


def test_every_token_is_the_one_its_own_number_falls_on(
    tiny: nn.Module, engine: Engines, prompts: Prompts
) -> None:
    """The whole chain by hand: a plain pass, its cumulative probabilities, uniform(seed, row, position)."""
    rollouts = engine(seed=11, max_rows=3).generate(prompts(4, 9, 1), samples=2)
    for rollout in rollouts_of(rollouts):
        running = torch.softmax(reference_logits(tiny, rollout.tokens).double(), -1).cumsum(-1)
        for place in range(rollout.loss_mask.index(True), len(rollout.tokens)):
            number = uniform(11, torch.tensor(rollout.row), torch.tensor(place))
            edges = running[place - 1] / running[place - 1, -1]
            token = rollout.tokens[place]
            below = edges[token - 1] if token else torch.tensor(0.0)
            assert below - 1e-5 <= number <= edges[token] + 1e-5


def test_rows_come_by_prompt_then_sample_with_their_columns(engine: Engines, prompts: Prompts) -> None:
    batch = prompts([1, 2, 3], [4], epoch=2)
    found = rollouts_of(engine(max_rows=2).generate(batch, samples=3))
    assert [tuple(rollout.row) for rollout in found] == [(2, p, s) for p in range(2) for s in range(3)]
    assert [rollout.columns for rollout in found] == ['{"n": 0}'] * 3 + ['{"n": 1}'] * 3
    for rollout in found:
        prompt = batch.ragged("tokens").rows()[rollout.row.prompt].tolist()
        assert list(rollout.tokens[: len(prompt)]) == prompt
        assert rollout.loss_mask == (False,) * len(prompt) + (True,) * 12
    assert len({rollout.tokens for rollout in found}) == 6


def test_company_slots_and_order_change_no_text(engine: Engines, prompts: Prompts) -> None:
    batch = prompts(3, 8, 1, 20, 5, 5, 12)
    wanted = {rollout.row: rollout for rollout in rollouts_of(engine(stop_tokens=[3]).generate(batch, 2))}
    backwards = engine(stop_tokens=[3], max_rows=3).generate(batch.select([6, 2, 4, 0, 5, 1, 3]), 2)
    for rollout in rollouts_of(backwards):
        assert rollout.tokens == wanted[rollout.row].tokens
        assert rollout.logprobs == pytest.approx(wanted[rollout.row].logprobs, abs=1e-5)


def test_the_seed_and_the_row_id_decide_the_text(engine: Engines, prompts: Prompts) -> None:
    batch = prompts([1, 2, 3])
    first = engine(seed=1).generate(batch).ragged("tokens").values
    assert torch.equal(first, engine(seed=1).generate(batch).ragged("tokens").values)
    assert not torch.equal(first, engine(seed=2).generate(batch).ragged("tokens").values)
    other = Batch(ids=batch.ids + torch.tensor([1, 0, 0]), fields=batch.fields)
    assert not torch.equal(first, engine(seed=1).generate(other).ragged("tokens").values)


def test_a_row_ends_at_any_of_several_stop_tokens_and_keeps_it(engine: Engines, prompts: Prompts) -> None:
    stops = {3, 9, 30, 31, 50}
    found = rollouts_of(engine(stop_tokens=stops, max_tokens=9).generate(prompts(5, 6, 7), samples=6))
    assert {rollout.finish for rollout in found} == {Finish.STOP, Finish.LENGTH}
    for rollout in found:
        mine = [t for t, sampled in zip(rollout.tokens, rollout.loss_mask, strict=True) if sampled]
        assert not stops & set(mine[:-1])
        assert (mine[-1] in stops) == (rollout.finish is Finish.STOP)
        assert rollout.finish is Finish.STOP or len(mine) == 9


def test_an_answer_of_the_end_token_alone_is_kept(tiny: nn.Module, engine: Engines, prompts: Prompts) -> None:
    batch = prompts([7, 8, 9])
    stop = int(reference_logits(tiny, [7, 8, 9])[-1].argmax())
    (found,) = rollouts_of(engine(temperature=0.0, stop_tokens=[stop]).generate(batch))
    assert found.tokens == (7, 8, 9, stop)
    assert found.finish is Finish.STOP


def test_the_stop_token_in_a_prompt_ends_nothing(engine: Engines, prompts: Prompts) -> None:
    (found,) = rollouts_of(engine(stop_tokens=[5], max_tokens=1).generate(prompts([5, 5, 5])))
    assert sum(found.loss_mask) == 1


def test_a_row_ends_when_the_context_is_full(engine: Engines, prompts: Prompts) -> None:
    found = rollouts_of(engine(context=10, max_tokens=50).generate(prompts(9, 3, 1)))
    assert [len(rollout.tokens) for rollout in found] == [10, 10, 10]
    assert {rollout.finish for rollout in found} == {Finish.LENGTH}


def test_rows_of_one_batch_may_be_drawn_differently(engine: Engines, prompts: Prompts) -> None:
    kinds = [
        SamplingConfig(max_tokens=9),
        SamplingConfig(max_tokens=4, temperature=0.0),
        SamplingConfig(max_tokens=6, top_k=2),
        SamplingConfig(max_tokens=7, min_p=0.3),
        SamplingConfig(max_tokens=8, repetition_penalty=1.5),
        SamplingConfig(max_tokens=8, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5),
    ]
    batch = prompts(6, 6, 6, 6, 6, 6)
    starts = [
        Rollout.start(row, tokens.tolist())
        for row, tokens in zip(batch.row_ids(), batch.ragged("tokens").rows(), strict=True)
    ]
    together = engine()
    for start, kind in zip(starts, kinds, strict=True):
        together.add(start, kind)
    found = finish_all(together)
    for start, kind in zip(starts, kinds, strict=True):
        alone = engine()
        alone.add(start, kind)
        assert finish_all(alone)[start.row].tokens == found[start.row].tokens
        assert sum(found[start.row].loss_mask) == kind.max_tokens


@pytest.mark.parametrize("deterministic", [False, True])
def test_penalties_count_what_a_row_sampled_before_it_was_taken_out(
    engine: Engines, prompts: Prompts, deterministic: bool
) -> None:
    start = Rollout.start(RowId(0, 0, 0), [3, 3, 3])
    make = {"frequency_penalty": 1e4, "deterministic": deterministic, "max_tokens": 40}
    whole, parted = engine(**make), engine(**make)
    whole.add(start)
    parted.add(start)
    for _ in range(15):
        parted.step()
    parted.add(parted.abort(start.row))
    (one,), (other,) = (finish_all(each).values() for each in (whole, parted))
    assert one.tokens == other.tokens
    assert len(set(one.tokens[3:])) == 40


def test_sampling_given_to_generate_replaces_the_engines(engine: Engines, prompts: Prompts) -> None:
    greedy = engine(temperature=0.0).generate(prompts(5))
    asked = engine().generate(prompts(5), sampling=SamplingConfig(temperature=0.0, max_tokens=12))
    assert torch.equal(greedy.ragged("tokens").values, asked.ragged("tokens").values)


@pytest.mark.parametrize("steps", [0, 1, 5, 70])
def test_a_row_taken_out_goes_on_as_if_nothing_had_been(
    steps: int, engine: Engines, prompts: Prompts
) -> None:
    batch = prompts(6, 9, 2)
    settings = {"max_tokens": 90, "max_rows": 2}
    wanted = {rollout.row: rollout for rollout in rollouts_of(engine(**settings).generate(batch))}
    running = engine(**settings)
    for row, tokens in zip(batch.row_ids(), batch.ragged("tokens").rows(), strict=True):
        running.add(Rollout.start(row, tokens.tolist()))
    for _ in range(steps):
        running.step()
    taken = [running.abort(row) for row in batch.row_ids()]
    assert not running.has_work
    assert [sum(rollout.loss_mask) for rollout in taken] == [steps, steps, 0]
    assert {rollout.finish for rollout in taken} == {Finish.ABORTED}
    other = engine(**settings)
    for rollout in reversed(taken):
        other.add(rollout)
    for row, rollout in finish_all(other).items():
        assert rollout.tokens == wanted[row].tokens
        assert rollout.logprobs == pytest.approx(wanted[row].logprobs, abs=1e-5)


def test_what_was_inserted_is_read_and_not_counted(tiny: nn.Module, engine: Engines) -> None:
    """The next turn of a conversation: sampled, inserted, sampled."""
    first = engine(max_tokens=4)
    first.add(Rollout.start(RowId(0, 0, 0), [1, 2, 3]))
    answer = finish_all(first)[RowId(0, 0, 0)].inserted([9, 10])
    second = engine(max_tokens=7)
    second.add(answer)
    (found,) = finish_all(second).values()
    assert found.tokens[: len(answer.tokens)] == answer.tokens
    assert found.loss_mask == (False,) * 3 + (True,) * 4 + (False,) * 2 + (True,) * 3
    assert sampled_logprobs(found) == pytest.approx(replayed(tiny, found), abs=1e-5)


def test_every_token_carries_the_version_it_was_sampled_under(
    build: Build, engine: Engines, prompts: Prompts
) -> None:
    """After new weights arrive in the middle of rows, every further token follows them."""
    module = build()
    running = engine(module, max_rows=2)
    running.load(4, {})
    for row, tokens in zip(prompts(5, 3, 4).row_ids(), prompts(5, 3, 4).ragged("tokens").rows(), strict=True):
        running.add(Rollout.start(row, tokens.tolist()))
    for _ in range(5):
        running.step()
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.1)
    running.load(5, {})
    found = finish_all(running)
    assert [[v for v in rollout.versions if v >= 0] for _, rollout in sorted(found.items())] == [
        [4] * 5 + [5] * 7,
        [4] * 5 + [5] * 7,
        [5] * 12,
    ]
    for rollout in found.values():
        wanted = replayed(module, rollout)
        count = sum(version == 5 for version in rollout.versions)
        assert sampled_logprobs(rollout)[-count:] == pytest.approx(wanted[-count:], abs=1e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_a_row_may_keep_what_old_weights_read_of_it(
    build: Build, engine: Engines, prompts: Prompts, keep: bool
) -> None:
    """Its next token follows from transformers' cache filled with old weights, or from a new one."""
    module, start = build(), prompts(9, 1)
    plain = AutoModelForCausalLM.from_config(deepcopy(module.config), attn_implementation="eager").eval()
    plain.load_state_dict(module.state_dict())
    running = engine(module, keep_cache=keep)
    running.load(4, {})
    running.add(Rollout.start(start.row_ids()[0], start.ragged("tokens").lists()[0]))
    for _ in range(5):
        running.step()
    before = running._workers[0]._scheduler.running[0]
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.1)
        running.load(5, {})
        running.step()
        rollout = running.abort(before.rollout.row)
        read = torch.tensor([rollout.tokens[:-1]])
        old = plain(read[:, :-1], use_cache=True).past_key_values
        plain.load_state_dict(module.state_dict())
        kept = plain(read[:, -1:], past_key_values=old).logits[0, -1].log_softmax(-1)
    told, kept_says = rollout.logprobs[-1], float(kept[rollout.tokens[-1]])
    again = replayed(module, rollout)[-1]
    assert abs(kept_says - again) > 1e-3
    assert told == pytest.approx(kept_says if keep else again, abs=1e-5)
    assert [version for version in rollout.versions if version >= 0] == [4] * 5 + [5]


def test_nothing_made_from_old_weights_outlives_a_call(
    build: Build, engine: Engines, prompts: Prompts
) -> None:
    module = build()
    batch = prompts(20, 6)
    used = engine(module, max_rows=1)
    used.generate(batch, samples=2)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    again = used.generate(batch, samples=2)
    fresh = engine(module, max_rows=1).generate(batch, samples=2)
    assert torch.equal(again.ragged("tokens").values, fresh.ragged("tokens").values)
    assert torch.equal(again.ragged("sampler_logprobs").values, fresh.ragged("sampler_logprobs").values)


def test_no_memory_is_held_between_calls(engine: Engines, prompts: Prompts) -> None:
    used = engine()
    used.generate(prompts(5, 5))
    assert used.held_bytes == 0
    used.add(Rollout.start(RowId(0, 0, 0), [1, 2]))
    used.step()
    assert used.held_bytes > 0
    used.abort(RowId(0, 0, 0))
    assert used.held_bytes == 0


def test_dropout_is_off_and_every_part_is_left_as_it_was(
    build: Build, engine: Engines, prompts: Prompts
) -> None:
    module = build(ARCHITECTURES["gpt2, learned positions"])
    calm = engine(module).generate(prompts(5, 6))
    module.train()
    frozen = next(part for part in module.modules() if isinstance(part, nn.Dropout)).eval()
    modes = [part.training for part in module.modules()]
    wild = engine(module).generate(prompts(5, 6))
    assert torch.equal(calm.ragged("tokens").values, wild.ragged("tokens").values)
    assert [part.training for part in module.modules()] == modes
    assert not frozen.training


def test_a_batch_can_be_trained_on(tiny: nn.Module, engine: Engines, prompts: Prompts) -> None:
    """Autograd accepts all tensors of the result."""
    found = engine().generate(prompts(5))
    weight = torch.ones(1, requires_grad=True)
    (found.ragged("sampler_logprobs").values * weight).sum().backward()
    assert weight.grad is not None
    assert all(parameter.requires_grad for parameter in tiny.parameters())


def test_bfloat16_agrees_with_a_whole_pass_as_far_as_it_can(
    build: Build, engine: Engines, prompts: Prompts
) -> None:
    module = build().bfloat16()
    for rollout in rollouts_of(engine(module, max_rows=2).generate(prompts(5, 9, 2), samples=2)):
        assert sampled_logprobs(rollout) == pytest.approx(replayed(module, rollout), abs=0.15)


def test_a_long_row_outgrows_the_cache_and_the_window_of_random_numbers(
    tiny: nn.Module, engine: Engines, prompts: Prompts
) -> None:
    for rollout in rollouts_of(engine(max_rows=2, max_tokens=200).generate(prompts(3, 40), samples=2)):
        assert sampled_logprobs(rollout) == pytest.approx(replayed(tiny, rollout), abs=1e-5)


def test_all_answers_may_be_alike(engine: Engines, prompts: Prompts) -> None:
    found = rollouts_of(engine(temperature=0.0).generate(prompts(4), samples=5))
    assert len({rollout.tokens for rollout in found}) == 1


def test_one_engine_draws_each_call_by_that_calls_settings(engine: Engines, prompts: Prompts) -> None:
    """The same prompt in each call; only the settings differ."""
    used, batch = engine(), prompts([1, 2, 3])
    plain = SamplingConfig(max_tokens=8)
    settings = ({"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 2}, {"top_p": 0.3})
    kinds = [plain, *(plain.model_copy(update=each) for each in settings), plain]
    again = [used.generate(batch, sampling=kind) for kind in kinds]
    fresh = [engine().generate(batch, sampling=kind) for kind in kinds]
    for one, other in zip(again, fresh, strict=True):
        assert torch.equal(completions(one).values, completions(other).values)
    assert len({tuple(completions(one).values.tolist()) for one in again}) == 5


def test_slots_that_never_run_take_no_memory_and_change_no_bit(engine: Engines, prompts: Prompts) -> None:
    rows = prompts(3, 9, 5, 7, 2, 4)
    few, many = engine(max_rows=24, workers=1), engine(max_rows=10**12, workers=1)
    for name in ("tokens", "sampler_logprobs"):
        one, other = (each.generate(rows, samples=4).ragged(name).values for each in (few, many))
        assert torch.equal(one, other)


def test_too_little_memory_is_said_in_our_words(engine: Engines, prompts: Prompts) -> None:
    fixed = engine(max_rows=10**13, deterministic=True)
    with pytest.raises(RolloutError, match=r"rollout\.max_rows = 10,000,000,000,000") as caught:
        fixed.generate(prompts(1))
    assert "lower rollout.max_rows" in caught.value.fix
    assert not fixed.has_work
