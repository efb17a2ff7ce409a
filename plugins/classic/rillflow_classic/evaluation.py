"""Evaluation: whole episodes of one version of the weights, with the most likely actions; one as a video.

    Actor with GreedyPolicy ─┬─ a quota of episodes for each slot ──> returns ─> mean with its 95% interval
                             └─ environment.render, one episode ──> WebP ─> RUN/media/NAME.webp

Every slot plays equally many episodes: if the first episodes to end counted, short ones would be
overrepresented.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from PIL import Image

from rillflow.errors import ConfigError
from rillflow.formulas.interval import mean_interval
from rillflow.runs import durable, layout
from rillflow.runs.reader import Evaluation
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import EnvironmentFailure, VectorEnvironment
from rillflow_classic.fragment import Array, FinishedEpisode, Fragment
from rillflow_classic.policy import Acted, ActorPolicy, Weights
from rillflow_classic.workers.actor import Actor

MOST_SLOTS = 16
"""Most environments that play at the same time."""
MOST_STEPS = 1000
"""Longest filmed part of an episode."""
MOST_FRAMES = 200
"""Frames of a video; a longer episode is shown faster."""
WIDTH = 320
"""Largest width in pixels."""
HEIGHT = 480
"""Largest height in pixels."""
FRAME_MS = 40
"""Milliseconds that a frame is shown."""


def num_slots(episodes: int) -> int:
    """Return the number of environments for some episodes: the largest divisor up to ``MOST_SLOTS``."""
    return max(count for count in range(1, MOST_SLOTS + 1) if episodes % count == 0)


class GreedyPolicy:
    """The most likely actions of a policy that does not change meanwhile.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: ActorPolicy) -> None:
        self._policy, self.version = policy, policy.version

    def act(self, observations: Array, state: Array | None = None, *, greedy: bool = True) -> Acted:  # noqa: ARG002
        """See ActorPolicy."""
        assert self._policy.version == self.version, "one version plays a whole evaluation"
        return self._policy.act(observations, state, greedy=True)

    def initial_state(self, num_slots: int) -> Array | None:
        """See ActorPolicy."""
        return self._policy.initial_state(num_slots)

    def seed(self, seed: int) -> None:
        """Leave the policy's random numbers as they are: greedy actions need none."""

    def load(self, version: int, weights: Weights) -> None:  # noqa: ARG002
        """Raise AssertionError."""
        raise AssertionError("one version plays a whole evaluation")


def greedy_actor(
    environment: VectorEnvironment,
    policies: Mapping[str, ActorPolicy],
    routes: Mapping[str, str] | None,
    seed: int,
    steps: int = 16,
) -> Actor:
    """Return an actor whose policies take their most likely actions.

    Args:
        environment: its slots play.
        policies: policies by name.
        routes: policy by regular expression of its agents; None for one policy.
        seed: seed of the episodes.
        steps: steps between two looks at the episodes that have ended.
    """
    actor = Actor([environment], {n: GreedyPolicy(p) for n, p in policies.items()}, steps, routes=routes)
    actor.reset(seed)
    return actor


def evaluation_environment(
    settings: EnvironmentSettings, episodes: int, *, seed: int, copy: int, most_steps: int
) -> VectorEnvironment:
    """Make the environments of an evaluation; one, where there is room for one only.

    Args:
        settings: settings of the environment.
        episodes: number of episodes of each agent.
        seed: seed of the episodes.
        copy: number of the first environment among all of the run.
        most_steps: steps after which an episode is truncated; 0: never.

    Raises:
        ConfigError: none can be made.
        EnvironmentFailure: none can be reset.
    """
    first: ConfigError | EnvironmentFailure | None = None
    for slots in dict.fromkeys((num_slots(episodes), 1)):
        try:
            return make_environment(settings, slots, seed=seed, copy=copy, most_steps=most_steps)
        except (ConfigError, EnvironmentFailure) as error:
            first = first or error
    assert first is not None
    raise first


def cut_note(played: Sequence[FinishedEpisode], limit: int) -> str:
    """Return the note about episodes that ``evaluate.episode_limit`` cut; empty if there are none."""
    cut = sum(each.length >= limit for each in played) if limit else 0
    if not cut:
        return ""
    said = f"evaluate.episode_limit cut {cut} of {len(played)} episodes after {limit:,} steps"
    return f"{said}; environment.time_limit cuts episodes of training too"


def sampled(actor: Actor) -> Iterable[Fragment]:
    """Return the next fragment of every policy."""
    found = actor.sample()
    return [found] if isinstance(found, Fragment) else found.values()


def play(
    actor: Actor,
    num_slots: int,
    episodes: int,
    *,
    most_steps: int = 0,
    ends: Callable[[Sequence[FinishedEpisode], int], bool] | None = None,
) -> list[FinishedEpisode]:
    """Return the first ``episodes`` whole episodes of every slot.

    Args:
        actor: plays.
        num_slots: its slots.
        episodes: episodes of each slot.
        most_steps: steps of the longest possible episode; then slots whose agents come too rarely have fewer
            episodes. 0: no bound.
        ends: called with the episodes and the steps of each slot so far; returns whether to end with these.
    """
    counts, played, steps = Counter[tuple[str, int]](), list[FinishedEpisode](), 0
    bound = episodes * (most_steps + 1) if most_steps else math.inf
    while len(played) < num_slots * episodes:
        fragments = list(sampled(actor))
        for fragment in fragments:
            for episode in fragment.episodes:
                key = fragment.policy, episode.slot
                counts[key] += 1
                if counts[key] <= episodes:
                    played.append(episode)
        steps += len(fragments[0].rewards)
        if steps > bound or (ends is not None and ends(played, steps)):
            break
    return played


def judged_episodes(played: Sequence[FinishedEpisode], success: float | None) -> Evaluation:
    """Summarise episodes; returns that are all equal have an interval without width.

    Args:
        played: the episodes.
        success: smallest return of a successful one; None counts none.
    """
    returns = [each.total_reward for each in played]
    least, most = min(returns), max(returns)
    return Evaluation(
        count=len(played),
        mean_reward=fmean(returns),
        correct=None if success is None else sum(each >= success for each in returns),
        is_accuracy=False,
        is_return=True,
        interval=mean_interval(returns) or ((least, most) if len(returns) > 1 else None),
        more={"length_mean": fmean(each.length for each in played), "return_min": least, "return_max": most},
    )


def record_video(actor: Actor, environment: VectorEnvironment, run: Path, name: str) -> Path | None:
    """Film an episode into the run directory; None if the environment shows nothing.

    Args:
        actor: plays in the environment, one step in each fragment, from the start of an episode.
        environment: one environment that can render.
        run: the run directory.
        name: name of the file, without its end.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    frames, every, is_over = list[Array](), 1, False
    for step in range(MOST_STEPS):
        frame = environment.render(0)
        if frame is None and (frames or step):
            break  # nothing before the first step or after it
        if frame is not None and step % every == 0:
            frames.append(_small(frame))
        if len(frames) > 2 * MOST_FRAMES:
            frames, every = frames[::2], 2 * every
        if is_over:
            break
        is_over = all(fragment.ended.all() for fragment in sampled(actor))
    if not frames:
        return None
    file = run / layout.MEDIA / f"{name}.webp"
    with durable.writing(file):
        file.parent.mkdir(exist_ok=True)
    durable.replace(file, [animated(frames)])
    return file


def animated(frames: Sequence[Array]) -> bytes:
    """Return frames [H, W, 3] uint8 as an animated WebP of the first one's size, at most ``MOST_FRAMES``."""
    every = -(-len(frames) // MOST_FRAMES)
    pictures = [Image.fromarray(_small(frame)) for frame in frames[::every]]
    size = pictures[0].size
    first, *rest = (each if each.size == size else each.resize(size) for each in pictures)
    data = io.BytesIO()
    first.save(data, "WEBP", save_all=True, append_images=rest, duration=FRAME_MS, loop=0, quality=60)
    return data.getvalue()


def _small(frame: Array) -> Array:
    """Return a frame with at most ``WIDTH`` and ``HEIGHT`` pixels, so that a film of them fits the memory."""
    height, width = frame.shape[:2]
    scale = min(1.0, WIDTH / width, HEIGHT / height)
    if scale == 1.0:
        return np.array(frame)  # the environment may draw the next one in the same memory
    size = max(1, int(width * scale)), max(1, int(height * scale))
    return np.asarray(Image.fromarray(np.ascontiguousarray(frame)).resize(size))
