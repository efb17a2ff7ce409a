"""Divergence of two policies, estimated from tokens that one of them sampled. Legend: N tokens.

Where an estimate is paid decides which one has the right gradient, over tokens of pi:

    in the reward   E[k1 grad log pi]                    is that of KL(pi || ref); those of k2 and k3 are not
    in the loss     E[grad k2], exactly; E[grad k3]      is that of KL(ref || pi), the same at pi = ref
                    E[grad k1] = E[grad log pi] = 0      the reference falls out
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rillflow.errors import FormulaError, nearest

LARGEST_LOG_RATIO = 20.0
"""Nats beyond which a log ratio is held before its exponential, which overflows float32 above 88."""


def divergence(log_ratio: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """[N] an estimate of KL(pi || ref) from each token, d = log pi - log ref its log ratio.

    k1 = d; k2 = d^2 / 2; k3 = e^-d - 1 + d (J. Schulman, "Approximating KL divergence", 2020). On tokens
    of pi the means of k1 and k3 are the divergence; k2 and k3 are never negative. Below -20 k3 holds d at
    -20, without a gradient.

    Args:
        log_ratio: [N] float.
        estimator: which of the three.

    Raises:
        FormulaError: the estimator is unknown.
    """
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            held = log_ratio.clamp_min(-LARGEST_LOG_RATIO)
            return torch.expm1(-held) + held
        case _:
            raise FormulaError(
                f"divergence: estimator is {estimator!r}", fix=nearest(estimator, ("k1", "k2", "k3"))
            )
