"""Make the environments of a recipe.

config ─> catalog: who has the id ─> choose: inline or processes ─> slots ─> wrappers ─> VectorEnvironment
"""

from __future__ import annotations

from rillflow_classic.environments.catalog import find, make_lane
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.envpool_adapter import EnvPoolEnvironment
from rillflow_classic.environments.inline import InlineEnvironment
from rillflow_classic.environments.vector import VectorEnvironment


def make_environment(config: EnvironmentSettings, num_slots: int, *, seed: int = 0) -> VectorEnvironment:
    """Make environments with ``num_slots`` slots, and reset them with a seed.

    Raises:
        ConfigError: the id, the arguments or the number of slots cannot be used.
        EnvironmentFailure: the first reset failed.
    """
    entry = find(config)
    environment: VectorEnvironment
    if entry.provider == "envpool":
        environment = EnvPoolEnvironment(entry.name, config, num_slots)
    else:
        lanes = [make_lane(config, entry)]
        width = len(lanes[0].agents)
        lanes += [make_lane(config, entry, slot) for slot in range(width, num_slots, width)]
        environment = InlineEnvironment(lanes, clip=config.clip_actions)
    environment.reset(seed)
    return environment
