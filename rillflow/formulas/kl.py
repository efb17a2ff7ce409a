"""Divergence of two policies, estimated from tokens that one of them sampled. Legend: N tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rillflow.errors import FormulaError, nearest


def divergence(log_ratio: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """[N] an estimate of KL(pi || ref) from each token, d = log pi - log ref its log ratio.

    k1 = d; k2 = d^2 / 2; k3 = e^-d - 1 + d (J. Schulman, "Approximating KL divergence", 2020). On tokens
    of pi the means of k1 and k3 are the divergence; k2 and k3 are never negative.

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
            return torch.expm1(-log_ratio) + log_ratio
        case _:
            raise FormulaError(
                f"divergence: estimator is {estimator!r}", fix=nearest(estimator, ("k1", "k2", "k3"))
            )
