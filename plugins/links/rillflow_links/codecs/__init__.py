"""Codecs: how the tensors of an edge are written as bytes."""
