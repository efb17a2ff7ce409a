"""Trained policy: acts in the user's own loop as it acts in an evaluation of its run.

    observation ─ batch ─ scaled, stacked ─> ActorPolicy ─> action ─ bounds, dtype of the environment's space
                            ^    memory: stacked frames, recurrent state ─ reset() begins an episode
                            └─ statistics of the checkpoint, frozen

Legend: N rows of a batch, A actions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rillflow.errors import RillflowError, RunDirectoryError
from rillflow.runs.reader import Evaluation
from rillflow_classic.build import Parts
from rillflow_classic.environments.actions import ActionSpaces
from rillflow_classic.environments.make import make_video_environment
from rillflow_classic.environments.observations import ObservationSpaces, WrongValue
from rillflow_classic.environments.preprocessing import Preprocessing
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.evaluation import (
    evaluation_environment,
    greedy_actor,
    judged_episodes,
    play,
    record_video,
)
from rillflow_classic.fragment import Array, FinishedEpisode
from rillflow_classic.policy import ActorPolicy
from rillflow_classic.seeds import seed_of
from rillflow_classic.workers.actor import Actor, restarted, routed

if TYPE_CHECKING:
    from torch import nn

EVALUATED = 1
"""Added to the seed of an evaluation's episodes."""


class PolicyError(RillflowError):
    """An observation, a mask or a call that does not fit a trained policy."""


class FilmError(RillflowError):
    """A video that cannot be made."""


class TrainedPolicy:
    """The policy of a checkpoint, from ``rillflow_classic.load``.

    Args:
        parts: what the run made its workers from.
        policies: policies by name, with the weights of the checkpoint.
        statistics: running statistics of its observations by name; empty without normalisation.
        run: the run directory.
        step: step of the checkpoint.
        run_seed: seed of the run.
        remark: what its algorithm says about acting without training; may be empty.

    Example:
        policy = rillflow_classic.load("runs/first")
        observation, _ = environment.reset()
        policy.reset()
        action = policy.act(observation)
    """

    def __init__(
        self,
        parts: Parts,
        policies: Mapping[str, ActorPolicy],
        statistics: Mapping[str, Array],
        *,
        run: Path,
        step: int,
        run_seed: int,
        remark: str = "",
    ) -> None:
        self.run, self.step, self.remark = run, step, remark
        self.policies = policies
        """The acting networks by name; one unless the recipe has ``[policies]``."""
        self.observation_space, self.action_space = parts.own_spaces
        """Spaces of the environment: ``act`` takes observations and returns actions of these."""
        self.observations = ObservationSpaces.of(self.observation_space, "the observations")
        self.actions = ActionSpaces.of(self.action_space, "the actions")
        """Ways between these spaces and those of the network."""
        self._parts, self._statistics, self._run_seed = parts, statistics, run_seed
        self._memories = dict[str, _Memory]()

    def __repr__(self) -> str:
        return f"<policy of {self.run}, step {self.step}: {self.observation_space} -> {self.action_space}>"

    def policy_of(self, agent: str = "") -> str:
        """Return the name of the policy that acts for an agent.

        Raises:
            ConfigError: no policy does.
        """
        return routed(agent, self._parts.routes or {".*": next(iter(self.policies))})

    def act(self, observation: Any, *, sample: bool = False, mask: Any = None) -> Any:
        """Return an action of the environment's action space.

        Args:
            observation: one observation of ``observation_space``, or N of them along a first axis; of a
                Dict, a list of N, or a dict whose parts have this axis. With several agents, a dict by
                agent; so is the result.
            sample: draw from the policy's distribution, as in training; otherwise take the likeliest action.
            mask: [A] or [N, A] bool: the discrete actions that are allowed; with several agents a dict.

        Raises:
            PolicyError: the observation or the mask does not fit.
        """
        if self._parts.names != ("",) and isinstance(observation, Mapping):
            masks = dict.fromkeys(observation) if mask is None else mask
            return {
                agent: self._act(str(agent), each, sample, masks[agent])
                for agent, each in observation.items()
            }
        if len(self.policies) > 1:
            raise PolicyError(
                f"one observation is given to the policies {', '.join(self.policies)}",
                why="each policy acts for agents of its own",
                fix="give a dict by agent: policy.act({'AGENT': observation, ...})",
            )
        return self._act("", observation, sample, mask)

    def reset(self, ended: Any = None, *, seed: int | None = None) -> None:
        """Begin an episode: forget recurrent states and stacked frames.

        Only policies with an LSTM or with stacked frames remember something; for others, nothing changes.

        Args:
            ended: [N] bool: the rows of a batch that begin an episode; None for all, of all agents.
            seed: restarts the random numbers of sampled actions.
        """
        if seed is not None:
            for place, policy in enumerate(self.policies.values()):
                policy.seed(seed + place)
        if ended is None:
            self._memories.clear()
            return
        for memory in self._memories.values():
            memory.restart(np.asarray(ended, bool))

    def play(
        self, episodes: int | None = None, *, seed: int | None = None, sample: bool = False
    ) -> list[FinishedEpisode]:
        """Play whole episodes in new environments of the recipe, and return them with returns and lengths.

        ``evaluate.episode_limit`` cuts those that are longer.

        Args:
            episodes: number of episodes of each agent; None for ``evaluate.episodes``.
            seed: seed of the episodes; None for those of the run's own evaluation of this step.
            sample: see ``act``.

        Raises:
            RillflowError: the environment failed.
        """
        episodes = (self._parts.evaluate.episodes or 1) if episodes is None else episodes
        if episodes < 1:
            raise PolicyError(f"episodes is {episodes}", why="at least one is played", fix="give 1 or more")
        seed = self._seed(seed)
        parts, limit = self._parts, self.episode_limit
        environment = evaluation_environment(
            parts.environment, episodes, seed=seed, copy=parts.evaluation_copy, most_steps=limit
        )
        try:
            actor = self._actor(environment, seed, sample, steps=16)
            slots = environment.num_slots // len(parts.names)
            return play(actor, environment.num_slots, episodes // slots, most_steps=limit)
        finally:
            environment.close()

    def evaluate(
        self, episodes: int | None = None, *, seed: int | None = None, sample: bool = False
    ) -> Evaluation:
        """Return the mean return of episodes with its 95% interval; see ``play``."""
        return judged_episodes(self.play(episodes, seed=seed, sample=sample), self.success)

    def film(self, file: str | Path, *, seed: int | None = None, sample: bool = False) -> Path | None:
        """Write an episode as an animated WebP; return None if the environment draws no pictures.

        Raises:
            PolicyError: the file's name does not end in ``.webp``, or the file exists.
            FilmError: graphics or the environment failed.
            RunDirectoryError: it cannot be written.
        """
        path, seed = Path(file), self._seed(seed)
        if path.suffix != ".webp" or path.exists() or not path.parent.is_dir():
            raise PolicyError(
                f"the video is {path}: {'it already exists' if path.exists() else 'no new file.webp'}",
                why="a video is a new .webp file in an existing folder; browsers show it",
                fix="write for example episode.webp",
            )
        try:
            return self._filmed(path, seed, sample)
        except RunDirectoryError:
            raise
        except (Exception, SystemExit) as error:  # graphics and the user's class raise anything
            raise FilmError(
                f"there is no video of {self._parts.environment.id}: {type(error).__name__}: {error}",
                why="the environment, or the graphics it draws with, failed",
                fix="correct render, or act without a video",
            ) from error

    def module(self, policy: str | None = None) -> nn.Module:
        """Return a plain ``torch.nn.Module``: observations [N, ...] in, the likeliest actions [N, ...] out.

        It holds the statistics of normalised observations, and needs no Rillflow to be saved or exported.
        See ``rillflow_classic.export.module_of``.

        Args:
            policy: name of the policy; None if there is one.

        Raises:
            ConfigError: there is no such policy, or its kind has no module.
        """
        from rillflow_classic.export import module_of

        return module_of(self, policy)

    @property
    def success(self) -> float | None:
        """Smallest return of a successful episode; None if the recipe does not say."""
        return self._parts.evaluate.success

    @property
    def episode_limit(self) -> int:
        """Steps after which ``play`` cuts an episode; 0 for no bound."""
        return self._parts.evaluate.episode_limit

    @property
    def statistics(self) -> Mapping[str, Array]:
        """Mean and number of the observations so far by name; empty without normalisation."""
        return self._statistics

    @property
    def frames(self) -> int:
        """Observations that each input of the network holds."""
        given, seen = self.own_shape, self._parts.observation_space.shape or ()
        return seen[0] if len(seen) == len(given) + 1 else 1

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of an observation before frames are stacked, as the network's arrays have it."""
        return tuple(self._parts.plain_space.shape or ())

    def _filmed(self, path: Path, seed: int, sample: bool) -> Path | None:
        settings, copy = self._parts.environment, self._parts.evaluation_copy
        environment = make_video_environment(settings, seed=seed, copy=copy)
        try:
            with TemporaryDirectory(dir=path.parent) as folder:
                actor = self._actor(environment, seed, sample, steps=1)
                made = record_video(actor, environment, Path(folder), path.stem)
                return None if made is None else made.rename(path)
        finally:
            environment.close()

    def _seed(self, seed: int | None) -> int:
        return seed_of(self._run_seed, self.step, EVALUATED) if seed is None else seed

    def _actor(self, environment: VectorEnvironment, seed: int, sample: bool, steps: int) -> Actor:
        if self._statistics:
            environment.restore(self._statistics, frozen=True)
        if not sample:
            return greedy_actor(environment, self.policies, self._parts.routes, seed, steps)
        actor = Actor([environment], self.policies, steps, routes=self._parts.routes)
        actor.reset(seed)
        return actor

    def _act(self, agent: str, observation: Any, sample: bool, mask: Any) -> Any:
        rows, is_batch = self._rows(observation)
        name = self.policy_of(agent)
        memory = self._memories.get(agent)
        if memory is None or (len(rows) != memory.count and not memory.matters):
            self._memories[agent] = memory = self._memory(self.policies[name], len(rows))
        if len(rows) != memory.count:
            raise PolicyError(
                f"{len(rows)} observations follow {memory.count}",
                why="the policy remembers the steps of an episode, row by row",
                fix="call policy.reset() before the first observation of an episode",
            )
        actions = self.actions.acted(memory.act(rows, sample, self._mask(mask, len(rows))))
        if is_batch:
            return actions
        return actions[0] if isinstance(self.action_space, spaces.Discrete) else actions[0, ...]

    def _memory(self, policy: ActorPolicy, count: int) -> _Memory:
        settings, plain = self._parts.environment, self._parts.plain_space
        if self.frames == 1 and not settings.normalise_observations:
            return _Memory(policy, None, count)
        preprocessing = Preprocessing(
            settings.model_copy(update={"normalise_rewards": False, "clip_rewards": False}),
            self.frames,
            count,
            plain,
        )
        preprocessing.restore(self._statistics, frozen=True)
        return _Memory(policy, preprocessing, count, stacks=self.frames > 1)

    def _rows(self, observation: Any) -> tuple[Array, bool]:
        """Return observations [N, ...] as the network's arrays have them, and whether a batch was given."""
        try:
            rows, is_batch = self.observations.rows(observation)
        except WrongValue as error:
            shape = list(self.observation_space.shape or ())
            one = f"numbers of shape {shape}" if not self.observations.parts else "a value of this space"
            raise PolicyError(
                str(error),
                why=f"the environment's observations are {self.observation_space}",
                fix=f"give {one}, or several along a first axis",
            ) from None
        if rows.dtype.kind == "f" and not np.isfinite(rows).all():
            raise PolicyError("an observation is NaN or infinite", why="a network cannot act on it")
        return rows, is_batch

    def _mask(self, mask: Any, count: int) -> Array | None:
        if mask is None:
            return None
        space = self.action_space
        if not isinstance(space, spaces.Discrete):
            raise PolicyError(
                f"a mask is given, and actions are {space}",
                why="a mask names the allowed ones of finitely many actions",
                fix="leave it out",
            )
        array = np.asarray(mask, bool)
        if array.shape not in ((space.n,), (count, space.n)) or not array.any(-1).all():
            raise PolicyError(
                f"the mask has the shape {list(array.shape)} and allows {array.sum()} actions",
                why=f"there are {count} observations and {space.n} actions; each row allows at least one",
                fix=f"give bools of shape [{space.n}] or [{count}, {space.n}]",
            )
        return np.broadcast_to(array, (count, int(space.n)))


class _Memory:
    """The rows of one agent: their stacked frames and recurrent states."""

    def __init__(
        self, policy: ActorPolicy, preprocessing: Preprocessing | None, count: int, *, stacks: bool = False
    ) -> None:
        self.count, self._policy, self._preprocessing = count, policy, preprocessing
        self._initial = self._state = policy.initial_state(count)
        self.matters = stacks or self._initial is not None
        """Whether an action depends on earlier observations."""
        self._begins = np.ones(count, np.bool_)

    def act(self, rows: Array, sample: bool, mask: Array | None) -> Array:
        """Return actions [N, ...] of the network, and remember the rows."""
        if self._preprocessing is not None:
            rows = self._preprocessing.seen(rows, self._begins)
        self._begins = np.zeros(self.count, np.bool_)
        more: dict[str, Any] = {}
        if mask is not None:
            if "mask" not in inspect.signature(self._policy.act).parameters:
                raise PolicyError(
                    f"{type(self._policy).__name__} acts without masks",
                    why="its method act has no argument mask",
                    fix="leave the mask out, or add the argument to the policy's class",
                )
            more = {"mask": mask}
        acted = self._policy.act(rows, self._state, greedy=not sample, **more)
        self._state = acted.state
        return acted.actions

    def restart(self, ended: Array) -> None:
        """Begin an episode in some rows, [N] bool."""
        if ended.shape != (self.count,):
            raise PolicyError(
                f"ended has the shape {list(ended.shape)}",
                why=f"there are {self.count} rows, each of which has ended or has not",
                fix=f"give bools of shape [{self.count}]",
            )
        self._begins = self._begins | ended
        if self._state is not None:
            self._state = restarted(self._state, self._initial, ended)
