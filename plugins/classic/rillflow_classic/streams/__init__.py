"""Streams of SRL (arXiv 2306.16688): requests for actions, and samples, between workers."""
