"""Answers: prompt the trained model of a run, and score or compare models on held-out prompts."""
