"""Interquartile means with 95% intervals of the stratified bootstrap, by rliable (arXiv 2108.13264).

PYTHON rliable_intervals.py < {"row": [score of each seed]}  ->  {"row": [mean, low, high]}
"""

from __future__ import annotations

import json
import sys

import numpy as np
from rliable.library import get_interval_estimates
from rliable.metrics import aggregate_iqm


def main() -> None:
    """Read the scores, and write the intervals; one environment is one stratum."""
    scores = {name: np.array(values)[:, None] for name, values in json.load(sys.stdin).items()}
    np.random.seed(0)  # rliable draws from the global generator
    means, bounds = get_interval_estimates(scores, lambda each: np.array([aggregate_iqm(each)]), reps=20_000)
    found = {name: [float(means[name][0]), *map(float, bounds[name][:, 0])] for name in scores}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
