"""Hardware: quantities with units, shipped devices, clusters that contradict themselves."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow_planner.hardware import Factors, read_hardware, shipped_devices, shipped_stacks
from rillflow_planner.units import DURATION, FLOPS, MEMORY, PRICE, RATE

FLEET: dict[str, Any] = {"device": "H100", "devices": 16, "per_machine": 8, "between": "50 GB/s"}
CLUSTERS = sorted((Path(__file__).parents[3] / "clusters").glob("*.toml"))


@pytest.mark.parametrize(
    ("quantity", "text", "number"),
    [
        (MEMORY, "80 GB", 80e9),
        (MEMORY, "64GiB", 64 * 2**30),
        (RATE, "400 Gb/s", 50e9),
        (RATE, "3.35 TB/s", 3.35e12),
        (FLOPS, "989 TFLOP/s", 989e12),
        (FLOPS, "2.5e3 TFLOPS", 2.5e15),
        (PRICE, "2.5 $/h", 2.5),
        (DURATION, "30 us", 30e-6),
        (MEMORY, "1_000 MB", 1e9),
    ],
)
def test_a_text_with_its_unit_is_a_number(quantity: Any, text: str, number: float) -> None:
    assert quantity(text, "here") == pytest.approx(number)


@pytest.mark.parametrize(
    "value", [80, 80e9, True, None, "80", "80 parsecs", "GB", "-80 GB", "1e30 GB", "0 GB"]
)
def test_without_unit_or_with_an_absurd_value_it_is_refused(value: object) -> None:
    with pytest.raises(PlanError) as caught:
        MEMORY(value, "device.mine, memory")
    assert "device.mine, memory" in caught.value.what
    assert repr(value) in caught.value.what


def test_a_forgotten_unit_is_answered_with_the_units_there_are() -> None:
    with pytest.raises(PlanError) as caught:
        MEMORY(80, "memory")
    assert "GB" in caught.value.fix


@given(number=st.floats(1, 900), unit=st.sampled_from(["MB", "GB", "TB", "MiB", "GiB"]))
def test_reading_scales_with_the_number(number: float, unit: str) -> None:
    one = MEMORY(f"1 {unit}", "here")
    assert MEMORY(f"{number:.3f} {unit}", "here") == pytest.approx(float(f"{number:.3f}") * one)


def test_devices_are_shipped_with_their_sources() -> None:
    devices = shipped_devices()
    assert set(devices) >= {"A100-40", "A100-80", "H100", "H200", "H800", "H20", "GB200", "cpu"}
    small = {"RTX3090", "RTX4090", "RTX5090", "L4", "A10", "A10G", "L40S", "RTX6000Ada", "A6000"}
    assert set(devices) >= small
    assert all(20 * 2**30 < devices[name].memory_bytes < 48 * 2**30 for name in small)
    assert all(device.source and set(device.flops) >= {"bfloat16", "float32"} for device in devices.values())
    assert devices["H100"].flops["bfloat16"] == pytest.approx(989e12)
    assert devices["A100-80"].memory_bandwidth == pytest.approx(2.039e12)


@pytest.mark.parametrize("path", CLUSTERS, ids=[path.stem for path in CLUSTERS])
def test_shipped_clusters_can_be_read(path: Path) -> None:
    hardware = read_hardware(tomllib.loads(path.read_text("utf-8")), path.stem)
    assert hardware.fleets[0].sizes[-1] == hardware.fleets[0].devices


def test_there_are_shipped_clusters() -> None:
    assert len(CLUSTERS) >= 3


def test_a_cluster_of_two_kinds_with_factors_and_a_device_of_its_own() -> None:
    data = {
        "machine_type": [
            FLEET,
            {"name": "mine", "device": "toy", "machines": 2, "per_machine": 4, "between": "1 GB/s"},
        ],
        "device": {
            "toy": {
                "memory": "8 GB",
                "memory_bandwidth": "100 GB/s",
                "inside": "10 GB/s",
                "host": "5 GB/s",
                "flops": {"float32": "1 TFLOP/s"},
            }
        },
        "factors": {"train_flops": 0.3, "launch_s": "50 us", "hidden": 0.5},
    }
    hardware = read_hardware(data, "two kinds")
    assert [fleet.devices for fleet in hardware.fleets] == [16, 8]
    assert hardware.fleet("mine").device.flops == {"float32": 1e12}
    assert hardware.factors.train_flops == 0.3
    assert hardware.factors.hidden == 0.5
    assert hardware.factors.launch_s == pytest.approx(50e-6)


def test_the_default_factors_are_ones_that_a_cluster_may_state() -> None:
    plain = read_hardware({"machine_type": [FLEET]}, "plain").factors
    seconds = {name: f"{value} s" for name, value in vars(plain).items() if name.endswith("_s")}
    numbers = {name: value for name, value in vars(plain).items() if value and name not in seconds}
    stated = read_hardware({"machine_type": [FLEET], "factors": seconds | numbers}, "stated")
    assert stated.factors == plain == Factors()


def test_a_machines_link_is_shared_by_its_devices() -> None:
    fleet = {**FLEET, "between_machine": "400 GB/s"}
    del fleet["between"]
    assert read_hardware({"machine_type": [fleet]}, "shared").fleets[0].between_bandwidth == pytest.approx(
        50e9
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "H101"}, "H100"),
        ({"devices": 12}, "12"),
        ({"devices": 0}, "0"),
        ({"devices": 2.0}, "2.0"),
        ({"devices": 10**9}, "1000000000"),
        ({"machines": 3}, "3"),
        ({"between": 50}, "50"),
        ({"between_machine": "400 GB/s"}, "between_machine"),
        ({"price": 2.5}, "2.5"),
        ({"per_machin": 8}, "per_machine"),
    ],
)
def test_a_contradictory_fleet_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_hardware({"machine_type": [{**FLEET, **changes}]}, "bad")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"machine_type": []},
        {"machine_type": [FLEET], "factor": {}},
        {"machine_type": [FLEET], "factors": {"train_flop": 0.3}},
        {"machine_type": [FLEET], "factors": {"train_flops": 1.5}},
        {"machine_type": [FLEET], "factors": {"train_flops": 0.0}},
        {"machine_type": [FLEET], "factors": {"launch_s": 0.1}},
        {"machine_type": [FLEET], "factors": {"hidden": -1.0}},
        {"machine_type": [FLEET, FLEET]},
        {"machine_type": [{"device": "H100"}]},
        {"machine_type": [{"device": "H100", "devices": 16, "per_machine": 8}]},
        {"machine_type": [FLEET], "device": {"toy": {"memory": "8 GB"}}},
    ],
)
def test_a_contradictory_cluster_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        read_hardware(data, "bad")
    assert caught.value.what


def test_a_cluster_is_like_a_shipped_stack_but_for_what_it_says_itself() -> None:
    stack = shipped_stacks()["nemo-rl"]
    plain = read_hardware({"machine_type": [FLEET], "like": "nemo-rl"}, "x")
    assert (plain.factors, plain.engine, plain.published) == (stack.factors, stack.engine, stack.published)
    assert plain.calibrated == stack.calibrated
    own = read_hardware({"machine_type": [FLEET], "like": "nemo-rl", "factors": {"train_flops": 0.3}}, "x")
    assert own.factors == replace(stack.factors, train_flops=0.3)
    assert own.calibrated == "" and own.published is not None
    assert own.published.placed is own.published.searched is None, "no error is known of other factors"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"like": "nemo"}, "x.like is 'nemo'"),
        ({"engine": {"zero2": True}}, "zero2"),
        ({"engine": {"zero1": 1}}, "engine.zero1 is 1"),
        ({"engine": {"cache": 2}}, "engine.cache is 2"),
        ({"factors": {"refit": 18e9}}, "factors.refit"),
        ({"machine_type": [{**FLEET, "price_per_hour": "2.5 $/h"}]}, "price_per_hour"),
        ({"machine_type": [{**FLEET, "between": "200 TB/s"}]}, "the link between machines is 200000 GB/s"),
    ],
)
def test_what_a_cluster_says_wrong_of_its_stack_is_named(data: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_hardware({"machine_type": [FLEET], **data}, "x")
    assert said in caught.value.what


def test_every_shipped_stack_says_what_it_was_fitted_on_and_how_far_off_it_is() -> None:
    stacks = shipped_stacks()
    assert set(stacks) >= {"default", "nemo-rl", "nemo-rl-0.6", "verl", "rillflow"}
    for name, stack in stacks.items():
        assert bool(stack.calibrated) == (name != "default")
        known = stack.published
        for error in (known.placed, known.searched) if known else ():
            if error is not None:
                assert 0 < error.low < error.high and 0 <= error.held <= 1 and error.median < error.worst
    told = {name for name, stack in stacks.items() if stack.published and stack.published.placed}
    fitted = {"nemo-rl", "nemo-rl-0.6", "nemo-rl-0.4", "nemo-rl-dtensor", "verl"}
    assert told == fitted, "no step of Rillflow on an accelerator and none of AReaL was fitted"
