"""The training engine: log probabilities, losses and optimiser steps over one module.

    minibatch ── loss.prepare ──> weights, one denominator ── cut by tokens ──> micro-batches
        micro-batch ── Scorer.forward ──> log probabilities of its loss tokens ── loss ──> terms [N]
        sum of terms / denominator ── backward ──> gradients ── Optimizer.step ──> weights

``minibatches`` divides one iteration's rows; ``Trainer`` does one optimiser step per minibatch; ``Scorer``
alone serves a model that is not trained.
"""
