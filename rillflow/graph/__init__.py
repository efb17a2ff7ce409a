"""Graph: an algorithm's step as data. Pure: no processes, no tensors.

step(flow, data, config) ── the same text, its values symbols ──> Tracer ──> Graph ──> text, Mermaid, JSON
                                                                               └──> planner, simulator
"""
