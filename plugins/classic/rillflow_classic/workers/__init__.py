"""Workers of SRL (arXiv 2306.16688): actor, policy, trainer, buffer, evaluation, population."""
