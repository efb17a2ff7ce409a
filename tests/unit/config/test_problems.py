"""Every kind of invalid value, with its error message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, model_validator

from rillflow.app.sections import Recipe
from rillflow.config.load import validate
from rillflow.config.problems import shown
from rillflow.config.schema import Section, walk
from rillflow.errors import ConfigError


class Engine(Section):
    """A section inside a section."""

    cylinders: int = Field(4, gt=0, description="Cylinders of the engine.")
    fuel: Literal["petrol", "diesel"] = "petrol"

    @model_validator(mode="after")
    def _smooth(self) -> Engine:
        if self.fuel == "diesel" and self.cylinders < 3:
            raise ValueError(f"fuel is diesel and cylinders is {self.cylinders}: it would shake")
        return self


class Car(Section):
    """One choice of a union."""

    kind: Literal["car"]
    engine: Engine = Engine()
    doors: int = Field(ge=2, le=5, description="Doors.")


class Truck(Section):
    """A choice whose engine has other defaults."""

    kind: Literal["truck"]
    engine: Engine = Engine(cylinders=8, fuel="diesel")


class Bicycle(Section):
    """The other choice of the union."""

    kind: Literal["bicycle"]
    gears: int = 1


class Garage(Section):
    """The root section."""

    name: str = Field("mine", pattern="^[a-z]+$")
    open: bool = True
    rate: float = Field(0.5, ge=0, lt=1, description="Share of an hour.")
    tags: tuple[str, ...] = ()
    vehicle: Car | Bicycle | Truck = Field(discriminator="kind")
    spare: Engine | None = None
    paint: Literal["red", "green"] | None = None


BICYCLE = {"kind": "bicycle"}
TRUCK = {"kind": "truck"}
CAR = {"kind": "car", "doors": 3}


def problem(**data: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(Garage, {"vehicle": BICYCLE, **data}, "garage.toml")
    return caught.value


@pytest.mark.parametrize(
    ("data", "what", "why", "fix"),
    [
        ({"paint": "gren"}, "paint is", "'red' or 'green'", "green"),
        ({"rate": 1}, "rate is 1", "less than 1 (Share of an hour.)", "the default, 0.5"),
        ({"rate": -0.5}, "rate is -0.5", "at least 0", "the default"),
        ({"rate": float("nan")}, "rate is nan", "finite", "the default"),
        ({"rate": float("inf")}, "rate is inf", "finite", "the default"),
        ({"rate": "0.25"}, 'rate is "0.25"', "a number", "write 0.25 without quotes"),
        ({"rate": "fast"}, 'rate is "fast"', "a number", "the default"),
        ({"rate": True}, "rate is true", "a number", "the default"),
        ({"rate": None}, "rate is none", "a number", "the default"),
        ({"open": 1}, "open is 1", "true or false", "the default, true"),
        ({"open": "true"}, 'open is "true"', "true or false", "write true without quotes"),
        ({"name": 3}, "name is 3", "a text in quotes", 'write "3", with quotes'),
        ({"name": "A"}, 'name is "A"', "^[a-z]+$", 'the default, "mine"'),
        ({"tags": "a"}, 'tags is "a"', "a list in brackets", "the default, []"),
        ({"tags": ["a", 2]}, "tags[1] is 2", "a text in quotes", "with quotes"),
        ({"spare": 4}, "spare is 4", "a section with the keys cylinders, fuel", "[spare]"),
        ({"spare": {"cylinders": 2.5}}, "spare.cylinders is 2.5", "whole number", "the default, 4"),
        (
            {"spare": {"fuel": "disel"}},
            'spare.fuel is "disel"',
            "'petrol' or 'diesel'",
            "did you mean 'diesel'?",
        ),
        ({"nam": "x"}, 'nam = "x": a recipe has no key', "name, open", "did you mean 'name'?"),
        (
            {"spare": {"cylindres": 2}},
            "spare.cylindres = 2: [spare] has no key",
            "fuel",
            "did you mean 'cylinders'?",
        ),
        ({"gears": 3}, "gears = 3", "it has", "'gears' is in another section: vehicle.gears"),
        ({"cylinders": 3}, "cylinders = 3", "it has", "spare.cylinders or vehicle.engine.cylinders"),
        (
            {"spare": {"engine": 3}},
            "spare.engine = 3",
            "it has",
            "'engine' is in another section: vehicle.engine",
        ),
        ({"of_an_hour": 3}, "of_an_hour = 3", "it has", "did you mean 'rate'?"),
        ({"colour": 3}, "colour = 3", "it has", "remove it"),
        ({"wheel": {"size": 3}}, "wheel = {size = 3}: a recipe has no section", "it has", "remove it"),
        ({"vehicle": None}, "vehicle is none", "a section", "[vehicle]"),
        ({"vehicle": {}}, "vehicle.kind is missing", '"car", "bicycle"', 'kind = "car"'),
        ({"vehicle": {"kind": "bicicle"}}, 'vehicle.kind is "bicicle"', '"car"', "did you mean 'bicycle'?"),
        (
            {"vehicle": {"kind": "car"}},
            "vehicle.doors is missing",
            "no default (Doors.)",
            "add doors = ... to [vehicle]",
        ),
        ({"vehicle": {**CAR, "doors": 7}}, "vehicle.doors is 7", "at most 5", "give another value"),
        ({"vehicle": {**CAR, "gears": 7}}, "vehicle.gears = 7: [vehicle] has no key", "doors", "'gears'"),
        ({"vehicle": {**CAR, "engine": {"fuel": "x"}}}, 'vehicle.engine.fuel is "x"', "petrol", "known"),
    ],
)
def test_a_problem_names_key_and_value_and_says_what_to_do(
    data: dict[str, Any], what: str, why: str, fix: str
) -> None:
    error = problem(**data)
    assert what in error.what
    assert why in error.why
    assert fix in error.fix


def test_a_missing_section_names_what_it_needs() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Garage, {}, "garage.toml")
    assert caught.value.what == "vehicle is missing"
    assert "[vehicle] with kind, doors" in caught.value.fix


def test_settings_of_a_section_that_cannot_go_together() -> None:
    caught = problem(vehicle={**CAR, "engine": {"fuel": "diesel", "cylinders": 2}})
    assert caught.what == "vehicle.engine: fuel is diesel and cylinders is 2: it would shake"
    assert "contradict each other" in caught.why


def test_long_values_are_cut() -> None:
    assert len(problem(open="x" * 5000).what) < 100


def test_values_are_shown_as_toml_has_them() -> None:
    assert shown({"a": [True, None, "x", 1.5]}) == '{a = [true, none, "x", 1.5]}'


def test_walking_a_schema_finds_every_choice() -> None:
    found = [key.dotted for key in walk(Garage)]
    assert "vehicle.engine.fuel" in found
    assert "vehicle.gears" in found
    assert found.index("vehicle") < found.index("vehicle.gears")


def test_what_is_given_of_a_section_is_laid_over_the_default_in_its_place() -> None:
    made = validate(Garage, {"vehicle": {**TRUCK, "engine": {"cylinders": 6}}, "spare": {}}, "it")
    assert isinstance(made.vehicle, Truck) and made.spare is not None
    assert (made.vehicle.engine.cylinders, made.vehicle.engine.fuel) == (6, "diesel")
    assert (made.spare.cylinders, made.spare.fuel) == (4, "petrol"), (
        "a preset is the place's, not the section's"
    )
    assert "fuel is diesel" in problem(vehicle={**TRUCK, "engine": {"cylinders": 2}}).what
    assert "the default, 8" in problem(vehicle={**TRUCK, "engine": {"cylinders": 0}}).fix
    assert "the default, 4" in problem(vehicle={**CAR, "engine": {"cylinders": 0}}).fix


class Renamed(Section):
    """A section with a renamed setting."""

    renamed: ClassVar[Mapping[str, str]] = {"colour": "paint"}
    paint: str = "red"


def test_an_old_name_is_refused_with_the_new_one() -> None:
    class Painted(Section):
        body: Renamed = Renamed()

    with pytest.raises(ConfigError, match="'colour' was renamed to 'paint'") as caught:
        validate(Painted, {"body": {"colour": "blue"}}, "a file")
    assert caught.value.fix == "write body.paint"


def test_new_names_of_settings_exist() -> None:
    """A new name is a key of the same section, or a dotted key."""
    keys = [*walk(Recipe)]
    sections, dotted = {key.section for key in keys}, {key.dotted for key in keys}
    wrong = [
        (one, new)
        for one in sections
        for new in one.renamed.values()
        if new not in one.model_fields and new not in dotted
    ]
    assert wrong == [] and sum(len(one.renamed) for one in sections) >= 10
