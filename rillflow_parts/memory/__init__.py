"""Memory: the peak bytes of every role and phase, from a step on fake tensors."""
