"""An agent with a calculator that samples from the policy over HTTP, like any client of OpenAI's protocol.

The policy's first token decides. "?" calls the calculator, whose result is appended to the row, and the
policy continues after it. Any other token begins the policy's own answer. The calculator's text is in the row
with loss mask 0; sampled tokens are trained. The policy learns to call the calculator and to add nothing.

    rillflow run examples/agent.toml --dir runs/agent
"""

from __future__ import annotations

import json
from urllib.request import ProxyHandler, Request, build_opener


def solve(prompt: str, base_url: str, api_key: str) -> str:
    """Answer one problem; the reward receives the return value as the column ``returned``."""

    def ask(text: str, max_tokens: int | None = None) -> str:
        says = json.dumps({"prompt": text, "max_tokens": max_tokens}).encode()
        request = Request(f"{base_url}/completions", says, {"Authorization": f"Bearer {api_key}"})
        with build_opener(ProxyHandler({})).open(request) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    first = ask(prompt, 1)
    if first == "?":
        result = str(calculated(prompt))
        return result + ask(f"{prompt}?{result}")
    return first + ask(prompt + first) if first else ""


def calculated(problem: str) -> int:
    """Return the calculator's result for a problem such as 17+25=."""
    for operator in "+-":
        left, found, right = problem.rstrip("=").partition(operator)
        if found:
            return int(left) + int(right) * (1 if operator == "+" else -1)
    raise ValueError(f"{problem!r} is no sum")


def right(returned: list[str], answer: list[str]) -> list[float]:
    """Return the share of an answer's characters that are right in their places."""
    return [
        sum(one == other for one, other in zip(said, wanted, strict=False)) / max(len(said), len(wanted), 1)
        for said, wanted in zip(returned, answer, strict=True)
    ]
