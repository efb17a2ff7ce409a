"""An agent written with openai-agents, with a tool, is trained unchanged.

The framework sends the tool's description, the policy answers with a call, the framework runs the tool and
sends the result, and the policy answers from it. Everything that the policy sampled is trained; the
framework's texts and the tool's results are in the row with loss mask 0.

    pip install openai-agents
    python examples/framework_agent.py runs/framework
    rillflow run examples/framework_agent_sft.toml --dir runs/framework/sft
    rillflow run examples/framework_agent.toml --dir runs/framework/agent

The first command writes a small model, demonstrations and prompts. In the demonstrations half of the answers
call the tool, and half guess. The agent's reward teaches the policy to call it. A real model that calls tools
needs no demonstrations: name it in ``policy.model.path``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

INSTRUCTIONS = "Add with the tool."


async def solve(prompt: str, base_url: str, api_key: str) -> str:
    """Answer one prompt; the reward receives the return value as the column ``returned``."""
    import agents
    from openai import AsyncOpenAI, BadRequestError

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    adder = agents.Agent(name="adder", instructions=INSTRUCTIONS, tools=[add], model=model)
    try:
        result = await agents.Runner.run(adder, prompt, max_turns=3)
    except (agents.MaxTurnsExceeded, agents.ModelBehaviorError, BadRequestError) as error:
        return f"no answer: {type(error).__name__}"  # an answer that earns nothing, not a failed agent
    return str(result.final_output)


def right(returned: list[str], answer: list[str]) -> list[float]:
    """Return 1 for the right answer."""
    return [float(said.strip() == wanted) for said, wanted in zip(returned, answer, strict=True)]


TEMPLATE = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- if m.role == 'system' and tools %}
{{- '\\nTools:' }}{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""A chat template with tools, of which it writes the names."""


def demonstrations(sums: list[tuple[int, int]], rng: Random) -> list[dict[str, Any]]:
    """Return rows of supervised data: for each sum a call, a guess, and an answer to some result."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = []
    for a, b in sums:
        arguments, result = {"a": a, "b": b}, str(rng.randrange(19))
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        turns: list[dict[str, Any]] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"{a}+{b}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
        ]
        told = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"
        for prompt, completion in ((turns[:2], told), (turns[:2], str(rng.randrange(19))), (turns, result)):
            rows.append({"prompt": prompt, "tools": tools, "completion": completion})
    return rows


def main(folder: Path) -> None:
    """Write the model, the demonstrations and the prompts."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    sums = [(a, b) for a in range(10) for b in range(10)]
    shown = demonstrations([(a, b) for a, b in sums if (a + 3 * b) % 4] * 2, Random(0))
    asked = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in sums]
    for name, rows in (("demonstrations", shown), ("prompts", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=names, initial_alphabet=alphabet)
    texts = [f"{row['completion']} {INSTRUCTIONS}\nTools: add user assistant system tool" for row in shown]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=names[1], pad_token=names[1])
    made.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(made),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.125,
        bos_token_id=None,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    made.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
