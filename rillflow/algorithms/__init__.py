"""Algorithms: one file and one screen each; ``registry`` is the one place that lists them.

    def step(flow, data, config):      one iteration; every line is an edge of the dataflow
        ...
        return report                  metrics of the update

Repeating ``step`` is the pipeline's work; where its stages run is the flow's.
"""
