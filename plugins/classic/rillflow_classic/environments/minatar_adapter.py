"""Games of MinAtar (Young and Tian, arXiv 1903.03176): small Atari games whose frames have 10 x 10 pixels.

    "MinAtar/Breakout-v1" ─> game, actions ─> MinAtarGame ─> uint8 frames [C, 10, 10], 255 where an object is

Its own Gymnasium class is not used: frames of bool fit no network here, its pictures are floats, and the
repeated action outlives a reset, so a resumed run would differ. The package is an extra of this one.
"""

from __future__ import annotations

import colorsys
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from rillflow.errors import ConfigError, install_plugin
from rillflow_classic.fragment import Array

PREFIX = "MinAtar/"
"""Beginning of the ids."""
GAMES = {f"{PREFIX}{''.join(map(str.title, each))}-v{version}": ("_".join(each), version == 1)
         for each in (("asterix",), ("breakout",), ("freeway",), ("seaquest",), ("space", "invaders"))
         for version in (0, 1)}  # fmt: skip
"""Name of the game by id, and whether it has only the actions with an effect."""
PIXEL = 16
"""Height and width of a cell in pictures."""


class MinAtarGame(gymnasium.Env[Array, int]):
    """A game.

    Args:
        game: its name in MinAtar.
        only_useful: whether actions without an effect in this game are left out.
        render_mode: ``rgb_array`` or None.
        arguments: of ``minatar.Environment``: ``sticky_action_prob`` and ``difficulty_ramping``.
    """

    def __init__(
        self, game: str, only_useful: bool, *, render_mode: str | None = None, **arguments: Any
    ) -> None:
        self.render_mode = render_mode
        self._game = importlib.import_module("minatar").Environment(game, **arguments)
        count = self._game.num_actions()
        self._actions = self._game.minimal_action_set() if only_useful else list(range(count))
        height, width, channels = self._game.state_shape()
        self.observation_space = gymnasium.spaces.Box(0, 255, (channels, height, width), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self._actions))  # type: ignore[assignment]
        hues = np.arange(channels) / channels
        self._colours = np.array([(0, 0, 0), *(colorsys.hsv_to_rgb(hue, 0.6, 1.0) for hue in hues)])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin an episode; a seed begins new random numbers."""
        del options
        if seed is not None:
            self._game.seed(seed)
        self._game.last_action = 0
        self._game.reset()
        return self._frame(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Act for one frame."""
        reward, ended = self._game.act(self._actions[action])
        return self._frame(), float(reward), bool(ended), False, {}

    def render(self) -> Array:
        """Return a picture [H, W, 3] of bytes; the last channel lies on top."""
        state = self._game.state()
        top = np.amax(state * (np.arange(state.shape[2]) + 1), axis=2)
        picture = (self._colours[top] * 255).astype(np.uint8)
        return np.kron(picture, np.ones((PIXEL, PIXEL, 1), np.uint8))

    def _frame(self) -> Array:
        found: Array = np.multiply(self._game.state().transpose(2, 0, 1), 255, dtype=np.uint8)
        return found


def minatar_game(name: str) -> Callable[..., Any] | None:
    """Return what makes the game of an id; None if this is no id of MinAtar.

    Raises:
        ConfigError: the package is not installed.
    """
    if name not in GAMES:
        return None
    if importlib.util.find_spec("minatar") is None:
        raise ConfigError(
            f"environment.id is {name!r}",
            why="the package minatar is not installed",
            fix=install_plugin("classic", "minatar"),
        )
    return partial(MinAtarGame, *GAMES[name])
