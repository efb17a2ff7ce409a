"""Built in: reward functions that a recipe names without a file. The child of a reward loads them by path."""
