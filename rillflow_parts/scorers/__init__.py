"""Scorers beside the recipe's own functions: math-verify, code-tests, rewards and judges over HTTP."""
