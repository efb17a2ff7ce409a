"""What a reward model learns from pairs of answers of which one was preferred. Legend: N pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rillflow.formulas.shapes import same_length


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[N] minus the log probability that the preferred answer of each pair is preferred, in nats.

    -log sigmoid(s_chosen - s_rejected); R. A. Bradley and M. E.
    Terry, Biometrika 1952; as a reward model's loss: InstructGPT, arXiv 2203.02155, equation 1.

    Args:
        chosen: [N] scores of the preferred answers.
        rejected: [N] scores of the others.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("bradley_terry", chosen=chosen, rejected=rejected)
    return -logsigmoid(chosen - rejected)


def preference_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[N] bool, True where the preferred answer has the higher score; the mean is the accuracy.

    Args:
        chosen: [N] scores of the preferred answers.
        rejected: [N] scores of the others.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("preference_accuracy", chosen=chosen, rejected=rejected)
    return chosen > rejected
