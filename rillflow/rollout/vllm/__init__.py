"""The vLLM engine: rows continued by vLLM, in this process, with weights handed over by name."""
