"""Algorithms: one short file each; ``registry`` lists them.

    def step(flow, data, config):      one iteration; every line is an edge of the dataflow
        ...
        return report                  metrics of the update

The pipeline repeats ``step``; the flow decides where its stages run.
"""
