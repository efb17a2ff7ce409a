"""Fuzz: hostile requests with a token, drawn by a seed, beside a client that sends ordinary ones."""
