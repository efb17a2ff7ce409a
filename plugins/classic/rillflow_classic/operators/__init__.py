"""Operators of RLlib Flow (arXiv 2011.12719): a plan as a graph of lazy iterators over workers."""
