"""Classic reinforcement learning on Rillflow's dataflow: actors, streams, operators, algorithms."""
