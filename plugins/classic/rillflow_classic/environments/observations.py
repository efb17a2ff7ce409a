"""Observations: from a value of the environment's own space to one array, or a refusal that names the value.

environment's space                        policy's space
Box                                        Box; larger floats become float32, one number a vector of it
Discrete                                   Discrete from 0 on
MultiDiscrete, MultiBinary, Dict, Tuple    Box [F], as gymnasium.spaces.flatten has it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rillflow_classic.environments.vector import array_space
from rillflow_classic.fragment import Array


class WrongValue(TypeError):
    """A value of an environment that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class ObservationSpaces:
    """The observation space of an environment, and the one that policies see.

    Example:
        spaces = ObservationSpaces.of(environment.observation_space, "the observations of 'Reach'")
        policy.act(spaces.array(observation)[None])
    """

    own: gymnasium.Space[Any]
    """The environment's."""
    policy: gymnasium.Space[Any]
    """A Box with an axis, or a Discrete from 0 on."""
    parts: Mapping[Any, ObservationSpaces]
    """Spaces of the parts of a Dict or a Tuple, by key or place."""

    @classmethod
    def of(cls, space: gymnasium.Space[Any], what: str) -> ObservationSpaces:
        """Return both spaces.

        Raises:
            ConfigError: values of the space are no array; ``what`` names it.
        """
        given: Mapping[Any, Any] = {}
        if isinstance(space, spaces.Dict):
            given = space.spaces
        elif isinstance(space, spaces.Tuple):
            given = dict(enumerate(space.spaces))
        parts = {key: cls.of(each, f"{what} at {key!r}") for key, each in given.items()}
        is_vector = isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary) or bool(parts)
        flat = spaces.flatten_space(space) if is_vector else space
        return cls(own=space, policy=array_space(flat, what), parts=parts)

    def array(self, value: Any) -> Array:
        """Return a value as an array of the policy's space, but for an axis of length 1.

        An assignment alone would broadcast and cast a wrong one.

        Raises:
            WrongValue: the value is none of the environment's space; bounds of a Box are not looked at.
        """
        if self.parts:
            return self._joined(value)
        try:
            array = np.asarray(value)
        except Exception as error:  # noqa: BLE001  __array__ of the user's object may raise anything
            raise WrongValue(f"an observation that is no array: {error}") from None
        own: Any = self.own
        is_box = isinstance(own, spaces.Box)
        dtype = np.dtype(self.policy.dtype if is_box else own.dtype)
        if array.shape != own.shape or not (
            array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind")
        ):
            got = f"{array.dtype} {list(array.shape)}"
            raise WrongValue(f"an observation of {got}, but observation_space is {dtype} {list(own.shape)}")
        if array.dtype != dtype:
            array = self._cast(array, dtype)
        if is_box:
            return array
        if isinstance(own, spaces.Discrete):
            number = int(array) - int(own.start)
            is_inside, found = 0 <= number < own.n, np.asarray(number)
        else:
            is_inside = own.contains(array)
            found = np.asarray(spaces.flatten(own, array)) if is_inside else array
        if not is_inside:
            raise WrongValue(f"the observation {array}, but observation_space is {own}")
        return found

    def rows(self, value: Any) -> tuple[Array, bool]:
        """Return one value, or several along a first axis, as an array [N, ...], and whether it was several.

        Several values of a Dict are a list of dicts, or a dict whose parts have the first axis; those of a
        Tuple are a tuple of such parts, as ``gymnasium.vector`` returns them.

        Raises:
            WrongValue: a value is none of the environment's space, or parts differ in length.
        """
        is_list = isinstance(self.own, spaces.Dict) and isinstance(value, list | tuple)
        lengths = {len(value)} if is_list else self._lengths(value)
        if None in lengths:
            values = [value]
        elif len(lengths) > 1:
            raise WrongValue(f"parts for {sorted(map(int, lengths))} observations of {self.own}")
        else:
            count = range(*lengths)
            values = value if is_list else [self._at(value, index) for index in count]
        shape = self.policy.shape or ()
        found = np.empty((len(values), *shape), self.policy.dtype)
        for index, each in enumerate(values):
            found[index] = self.array(each).reshape(shape)
        return found, None not in lengths

    def _lengths(self, value: Any) -> set[Any]:
        """Return the lengths of a first axis that parts have beyond their space; None for one without."""
        if not self.parts:
            try:
                array = np.asarray(value)
            except Exception:  # noqa: BLE001  ``array`` says what is wrong
                return {None}
            return {len(array) if array.ndim == len(self.own.shape or ()) + 1 else None}
        try:
            return {each for key, part in self.parts.items() for each in part._lengths(value[key])}
        except (KeyError, IndexError, TypeError):
            return {None}  # ``array`` says what is missing

    def _at(self, value: Any, index: int) -> Any:
        """Return one of several values."""
        if self.parts:
            return {key: part._at(value[key], index) for key, part in self.parts.items()}
        return np.asarray(value)[index]

    def _joined(self, value: Any) -> Array:
        """Return the parts of a value as one vector, in which a number of a Discrete is one-hot."""
        vectors = []
        for key, part in self.parts.items():
            try:
                found = part.array(value[key])
            except (KeyError, IndexError, TypeError) as error:
                reason = error if isinstance(error, WrongValue) else f"no value of this part in {value!r}"
                raise WrongValue(f"{reason}, at {key!r} of an observation of {self.own}") from None
            if isinstance(part.policy, spaces.Discrete):
                found = np.arange(part.policy.n) == found
            vectors.append(found.reshape(-1))
        return np.concatenate(vectors)

    def _cast(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Return an array in another dtype, which must be able to hold its numbers."""
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        wrong = (np.isinf(cast) & np.isfinite(array)) if dtype.kind == "f" else cast != array
        if np.count_nonzero(wrong):
            value = array[wrong].flat[0]
            raise WrongValue(f"the observation {value} in {self.own}, and {dtype} cannot hold it")
        return cast
