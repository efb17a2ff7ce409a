"""Export: a trained policy as a plain torch module, and as a file that other programs run.

    TrainedPolicy ─> PolicyModule: observations ─ scaled ─ network ─ likeliest action, in bounds
                       ├─ FILE.pt2   torch.export; torch.export.load(FILE).module()(observations)
                       └─ FILE.onnx  torch.onnx, for ONNX Runtime and others

Legend: N rows of a batch.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rillflow.errors import ConfigError
from rillflow.runs.durable import writing
from rillflow_classic.algorithms.sac import SquashedPolicy
from rillflow_classic.environments.preprocessing import LARGEST, RunningMoments
from rillflow_classic.networks.acting import NetworkPolicy
from rillflow_classic.networks.distributions import GaussianActions

if TYPE_CHECKING:
    from rillflow_classic.trained_policy import TrainedPolicy

ENDINGS = (".pt2", ".onnx")
"""Endings of the files that can be written."""
ONNX = ("onnx", "onnxscript")
"""Packages that an ONNX file needs to be written."""
OPSET = 18
"""Version of ONNX's operators."""


class PolicyModule(nn.Module):
    """The likeliest action of a policy, with its scaled observations and its bounds, as a plain module.

    With stacked frames, an observation is the stack [N, k, ...], oldest first. With an LSTM, ``forward`` also
    takes and returns a state [N, 2, H], which begins as zeros. An observation that is neither a Box nor a
    Discrete is the vector that ``gymnasium.spaces.flatten`` makes of it.

    Args:
        policy: a trained policy.
        name: name of the acting network.
    """

    policy_low: Tensor
    """Lower bounds of continuous actions, as the network has them."""
    policy_high: Tensor
    """Upper bounds of continuous actions, as the network has them."""
    low: Tensor
    """Lower bounds of continuous actions in the environment's own dtype."""
    high: Tensor
    """Upper bounds of continuous actions in the environment's own dtype."""
    combinations: Tensor
    """Own action of each number of the network, where actions are several numbers."""
    mean: Tensor
    """Mean of scaled observations."""
    scale: Tensor
    """Inverse standard deviation of scaled observations."""

    def __init__(self, policy: TrainedPolicy, name: str) -> None:
        super().__init__()
        acting: Any = policy.policies[name]
        self.is_squashed = isinstance(acting, SquashedPolicy)
        self.network = copy.deepcopy(acting.actor if self.is_squashed else acting.network)
        self.network.requires_grad_(False).eval()
        space: Any = policy.action_space
        acts = policy.actions
        self.is_discrete, self.dtype = isinstance(acts.policy, spaces.Discrete), _torch_dtype(space.dtype)
        self.shape = tuple(space.shape or ())
        self.start = int(space.start) if isinstance(space, spaces.Discrete) else 0
        given = policy.observation_space
        self.first = int(given.start) if isinstance(given, spaces.Discrete) else 0
        self.is_number = isinstance(given, spaces.Box) and not given.shape
        self.is_combined = acts.combinations is not None
        if acts.combinations is not None:
            self.register_buffer("combinations", torch.from_numpy(acts.combinations.astype(np.int64)))
        boxes: dict[str, Any] = {} if self.is_discrete else {"policy_": acts.policy, "": space}
        for prefix, box in boxes.items():
            self.register_buffer(f"{prefix}low", torch.from_numpy(box.low))
            self.register_buffer(f"{prefix}high", torch.from_numpy(box.high))
        self.is_scaled = "observations.mean" in policy.statistics
        if self.is_scaled:
            moments = RunningMoments()
            for part in vars(moments):
                vars(moments)[part] = policy.statistics[f"observations.{part}"]
            self.register_buffer("mean", torch.from_numpy(np.float32(moments.mean)))
            self.register_buffer("scale", torch.from_numpy(moments.scale))
        self.lstm_size = 0 if self.is_squashed else self.network.lstm_size
        """Width of its recurrent state; 0 without one."""

    def forward(self, observations: Tensor, state: Tensor | None = None) -> Any:
        """Return actions [N, ...]; with an LSTM, also the next state."""
        if self.first:
            observations = observations - self.first
        if self.is_number:
            observations = observations.unsqueeze(-1)
        if self.is_scaled:
            observations = ((observations.float() - self.mean) * self.scale).clamp(-LARGEST, LARGEST)
        if self.is_squashed:
            mean, _ = self.network(observations.float())
            return self._bounded(self.network.centre + self.network.radius * mean.tanh())
        output = self.network(observations, state)
        actions = self._actions(output.parameters)
        return (actions, output.state) if self.lstm_size else actions

    def _actions(self, parameters: Tensor) -> Tensor:
        if self.is_combined:
            return self.combinations[parameters.argmax(-1)].to(self.dtype)
        if self.is_discrete:
            return (parameters.argmax(-1) + self.start).to(self.dtype)
        if isinstance(self.network.distribution, GaussianActions):
            parameters = parameters.chunk(2, dim=-1)[0]
        return self._bounded(parameters)

    def _bounded(self, actions: Tensor) -> Tensor:
        actions = torch.minimum(torch.maximum(actions, self.policy_low), self.policy_high)
        actions = actions.reshape(-1, *self.shape) if len(self.shape) != 1 else actions
        return torch.minimum(torch.maximum(actions.to(self.dtype), self.low), self.high)


def module_of(policy: TrainedPolicy, name: str | None = None) -> PolicyModule:
    """Return a trained policy as a plain module; see ``PolicyModule``.

    Args:
        policy: the policy.
        name: name of the acting network; None if there is one.

    Raises:
        ConfigError: there is no such network, or it is of a class that has no module.
    """
    names = list(policy.policies)
    chosen = names[0] if name is None and len(names) == 1 else name
    if chosen is None or chosen not in policy.policies:
        raise ConfigError(
            f"the policy {name!r} is asked for",
            why=f"the policies of {policy.run} are {', '.join(names)}",
            fix=f"choose one by name, such as {names[0]!r}",
        )
    acting = policy.policies[chosen]
    if not isinstance(acting, NetworkPolicy | SquashedPolicy):
        raise ConfigError(
            f"the policy {chosen!r} acts with {type(acting).__name__}",
            why="only the networks of the shipped algorithms, and classes derived from them, become a module",
            fix="derive the policy from NetworkPolicy, or act with rillflow_classic.load(RUN).act",
        )
    return PolicyModule(policy, chosen)


def export(policy: TrainedPolicy, file: Path, name: str | None = None) -> None:
    """Write a trained policy to a file: ``.pt2`` for ``torch.export.load``, ``.onnx`` for ONNX.

    Args:
        policy: the policy.
        file: the file; it must not exist.
        name: see ``module_of``.

    Raises:
        ConfigError: the file exists or has another ending, a package is missing, or see ``module_of``.
        RunDirectoryError: the file cannot be written.
    """
    if file.suffix not in ENDINGS or file.exists() or not file.parent.is_dir():
        raise ConfigError(
            f"the export is {file}" + (", which already exists" if file.exists() else ""),
            why="an export is a new file in an existing folder that ends in .pt2 or .onnx",
            fix="write for example policy.pt2",
        )
    lacking = [each for each in ONNX if find_spec(each) is None]
    if file.suffix == ".onnx" and lacking:
        raise ConfigError(
            f"{' and '.join(lacking)} is not installed",
            why="torch writes ONNX with these packages",
            fix=f"pip install {' '.join(ONNX)}; or write a .pt2 file, which needs torch alone",
        )
    module = module_of(policy, name)
    given = policy.observation_space
    if not isinstance(given, spaces.Box | spaces.Discrete):
        given = policy.observations.policy
    frames = (policy.frames,) if policy.frames > 1 else ()
    example = torch.from_numpy(np.zeros((2, *frames, *(given.shape or ())), given.dtype))
    arguments: tuple[Tensor, ...] = (example + module.first,)
    if module.lstm_size:
        arguments = (*arguments, torch.zeros(2, 2, module.lstm_size))
    rows = torch.export.Dim("rows")
    shapes = tuple({0: rows} for _ in arguments)
    with torch.inference_mode(), writing(file), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # of the exporter about its own parts
        program = torch.export.export(module, arguments, dynamic_shapes=shapes)
        if file.suffix == ".pt2":
            torch.export.save(program, file)
            return
        stack.enter_context(_quiet("onnxscript", "torch.onnx._internal.exporter._registration"))
        names = ["observations", "state"][: len(arguments)]
        outputs = ["actions", "next_state"][: len(arguments)]
        torch.onnx.export(
            program,
            f=file,
            input_names=names,
            output_names=outputs,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """Hide warnings of the exporter about packages that no policy needs."""
    found = [logging.getLogger(name) for name in loggers]
    levels = [each.level for each in found]
    for each in found:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(found, levels, strict=True):
            each.setLevel(level)


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(1, dtype)).dtype
