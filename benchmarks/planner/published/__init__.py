"""What others published about their steps, and what the cost model makes of it."""
