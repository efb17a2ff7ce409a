"""Expected bytes: what ``check`` says about the codecs of a recipe, from its settings alone.

Positions of a share p of the values take H(p) bits a value; the codecs come within about 20% of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from rillflow.app.check_report import Report
from rillflow.app.facts import RecipeFacts
from rillflow.app.plugin_sections import section_of
from rillflow.runs.formatting import size
from rillflow_links.config import FEW, LinksConfig

CHANGED = 0.01
"""Share of bfloat16 weights that an update at a learning rate of about 1e-6 changes (arXiv 2602.03839)."""
_VALUE_BITS = {"top_k": 9.0, "dct": 9.0, "sparse_loco": 2.0}
"""Bits of a value; the exponents of the largest values take few."""
_CHUNK_BITS = 64 / 4096
"""The two sizes of a chunk of sparse_loco."""


def look_at_links(facts: RecipeFacts, report: Report) -> None:
    """Say what each codec of ``[links]`` sends."""
    links = section_of(facts.recipe, "links", LinksConfig)
    if links is not None and links != LinksConfig():
        report.say("links", [*_lines(facts, links)])


def entropy(share: float) -> float:
    """Return H(p) in bits."""
    return -share * log2(share) - (1 - share) * log2(1 - share) if 0 < share < 1 else 0.0


def gradient_bits(links: LinksConfig) -> float:
    """Return the expected bits that a codec sends for a gradient's value."""
    if links.gradients in _VALUE_BITS:
        chunk = _CHUNK_BITS if links.gradients == "sparse_loco" else 0.0
        return entropy(links.share) + links.share * _VALUE_BITS[links.gradients] + chunk
    return {"cast": 16.0, "int8": 8 + 32 / 256}.get(links.gradients, 32.0)


def _lines(facts: RecipeFacts, links: LinksConfig) -> Iterator[str]:
    sizes = facts.sizes
    if sizes is None or facts.adapter is not None:
        return  # an adapter is a small part of the model
    width = 32 if facts.model.dtype == "float32" else 16
    if links.weights == "delta":
        whole, changed = sizes.parameters * width / 8, (entropy(CHANGED) + 2 * CHANGED) / 8
        yield (
            f"weights: differences, and the whole {size(whole)} with every {links.full_every}th publish; "
            f"if {CHANGED:.0%} of the values change, a difference is about {size(sizes.parameters * changed)}"
        )
    if links.gradients != "dense":
        sent = sizes.parameters * gradient_bits(links) / 8
        small = (
            f"; tensors of fewer than {FEW} values are sent whole" if links.gradients in _VALUE_BITS else ""
        )
        yield (
            f"gradients: {links.gradients} sends about {size(sent)} from each rank in an optimiser step, "
            f"instead of {size(sizes.parameters * 4)}{small}"
        )
    if links.activations != "dense":
        ratio, cuts = links.activation_ratio, max(1, len(links.link_seconds))
        adapts = links.activations == "adatopk"
        from rillflow_links.codecs.cut_top_k import CutTopK, adapted  # it imports torch

        codec = CutTopK(adapted(ratio, links.link_seconds) if adapts else [ratio])
        kept = [codec.kept(sizes.hidden, cut) for cut in range(cuts if adapts else 1)]
        yield (
            f"activations: {', '.join(map(str, kept))} of a token's {sizes.hidden} values cross a cut; "
            "samples and evaluations are computed with all of them"
        )
