"""Node variables: name the environment variables whose values differ between the driver and a node.

    names in the user's code, settings of libraries, keys ─> keyed digests of the driver's values
        ── each node ──> not set there | another value there | set only there ──> one note a node

Values are neither sent nor shown. Ranks on this machine inherit the driver's variables; those of a running
cluster have the variables of ``ray start``, and the ones that ``placement.env`` passes.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence

from rillflow.workers.awaited import await_replies
from rillflow.workers.backend import Backend, Site
from rillflow_parts.nodes.files import first_places

_FAMILIES = (
    *("HF_", "HUGGING", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "NCCL_", "GLOO_", "OMP_", "MKL_"),
    *("TORCH_", "PYTORCH_", "CUBLAS_", "CUDA_"),
)
_SINGLE = {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "TZ", "PYTHONHASHSEED"}
_PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}
_OF_RANK = {"CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"}
"""Variables that Ray or Rillflow sets for every rank."""
_OF_SHELL = {"_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME"}
_SET_BY_RANK = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
"""Variables that a rank sets if nobody has."""
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")

NOT_THERE, OTHER, ONLY_THERE = "not set there", "another value there", "set only there"


def variable_notes(
    texts: Mapping[str, str], keys: Collection[str], backend: Backend, deadline_s: float
) -> list[str]:
    """Return a note on every node with other variables than this process.

    Args:
        texts: strings in the user's code, with the file that has each.
        keys: variables that the recipe names.
        backend: the backend with the ranks.
        deadline_s: longest wait for a node in seconds.
    """
    salt, firsts = secrets.token_bytes(16), first_places(backend.nodes)
    watched = {name for name in (*texts, *keys) if _NAME.fullmatch(name) or name in os.environ}
    here = _digests(watched, salt)
    calls = {at: backend.submit(at, _differing, sorted(watched), here, salt)[0] for at in firsts}
    there = await_replies("comparing its variables", calls, backend, deadline_s)
    return [_note(node.address, there[at], texts) for at, node in firsts.items() if there[at]]


def _note(node: str, differing: Mapping[str, str], texts: Mapping[str, str]) -> str:
    parts = [
        f"{name} ({f'in {texts[name]}; ' if name in texts else ''}{how})" for name, how in differing.items()
    ]
    passed = [name for name, how in differing.items() if how != ONLY_THERE]
    quoted = ", ".join(f'"{name}"' for name in passed)
    advice = f"; placement.env = [{quoted}] passes this shell's values" if passed else ""
    return f"ranks on node {node} have other environment variables: {', '.join(parts)}{advice}"


def _is_relevant(name: str, watched: Collection[str]) -> bool:
    if name in _OF_RANK | _OF_SHELL or name.startswith("RAY_"):
        return False
    matches = name.startswith(_FAMILIES) or name in _SINGLE or name.upper() in _PROXIES
    return matches or name in watched


def _digests(watched: Collection[str], salt: bytes) -> dict[str, str]:
    """Return a keyed digest of every relevant variable of this process."""
    return {
        name: hashlib.blake2b(os.fsencode(value), key=salt, digest_size=16).hexdigest()
        for name, value in os.environ.items()
        if _is_relevant(name, watched)
    }


def _differing(site: Site, watched: Sequence[str], driver: Mapping[str, str], salt: bytes) -> dict[str, str]:
    """Return how the variables of this rank's process differ from the driver's, by name."""
    del site
    own, found = _digests(set(watched), salt), dict[str, str]()
    for name in sorted({*driver, *own}):
        if name not in own:
            found[name] = NOT_THERE
        elif name not in driver:
            if name not in _SET_BY_RANK:
                found[name] = ONLY_THERE
        elif own[name] != driver[name]:
            found[name] = OTHER
    return found
