"""GPU: a GRPO step by stage with LoRA on a full, an int8 and a 4-bit base.

    python benchmarks/training/gpu_adapters.py --write benchmarks/results/gpu_adapters.md
    python benchmarks/training/gpu_adapters.py --shape 7b
    python benchmarks/training/gpu_adapters.py --rehearse    # the same on processors, tiny: checks the script

The stages are those of ``gpu.py``: generation, scoring and update of one step, timed apart, with the peak of
allocated device memory in each. The 4-bit base needs bitsandbytes.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import gpu

SMALLEST = ["--rehearse --steps 1"]
CHECKPOINTED = {"gradient_checkpointing": True}


def main() -> None:
    variants = {
        "LoRA, rank 16": ("full", {}),
        "LoRA, rank 16, gradient checkpointing": ("full", CHECKPOINTED),
        "LoRA, rank 16, base int8, gradient checkpointing": ("int8", CHECKPOINTED),
    }
    if find_spec("bitsandbytes") is not None:
        variants["LoRA, rank 16, base 4bit"] = ("4bit", {})
        variants["LoRA, rank 16, base 4bit, gradient checkpointing"] = ("4bit", CHECKPOINTED)
    if "--rehearse" in sys.argv:  # on processors a variant takes seconds, and the last one has everything
        variants = dict([[*variants.items()][-1]])
    gpu.VARIANTS.clear()
    gpu.VARIANTS.update(variants)
    sys.argv += ["--parts", "stages"]
    gpu.main()


if __name__ == "__main__":
    main()
