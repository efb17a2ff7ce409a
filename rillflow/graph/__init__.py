"""Graph: an algorithm's step as data, without processes or tensors.

step(flow, data, config) ── the same code, called with symbols ──> Tracer ──> Graph ──> text, Mermaid, JSON
                                                                                └──> planner, simulator
"""
