"""A recipe of seconds, with a warm start and its own reward; NAME is the algorithm's."""

from __future__ import annotations

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
lr = 1e-4
model.new = { hidden = 32, layers = 4, heads = 4, kv_heads = 2, context = 16, alphabet = "0123456789+=" }
[rollout]
max_rows = 32
max_tokens = 4
[warm_start]
steps = 3
prompts_per_step = 33
lr = 3e-3
[algorithm]
name = "NAME"
steps = 2
prompts_per_step = 5
samples_per_prompt = 3
minibatches = 2
loss.kl = 0.01
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""
