"""OpenAI endpoint: a model over OpenAI's protocol, for clients of `rillflow serve` and agents in training."""
