"""The vLLM engine: vLLM continues the rows, with weights passed to it by name."""
