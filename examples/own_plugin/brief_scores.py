"""The reward function itself; it runs in a child process, as a reward of your own does."""


def brief(prompts, completions, **columns):
    return [1.0 / (1 + len(text)) for text in completions]
