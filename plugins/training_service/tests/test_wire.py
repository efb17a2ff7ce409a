"""Wire: messages round-trip, with tensors dense and sparse; damaged ones are refused in words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rillflow.errors import DataError
from rillflow_training_service.datums import checked_data, read_pass
from rillflow_training_service.wire import (
    FLOAT32,
    decoded_pass,
    encoded_pass,
    encoded_samples,
    message,
    read_message,
    tensor_of,
)

sys.path.insert(0, str(Path(__file__).parent))
from toys import asked, body_of, datum, encoded, tensor_message, weighted


def test_a_pass_round_trips() -> None:
    rows = [weighted([1, 2, 3, 4], 2), weighted([5, 6], 1)]
    found = read_pass(body_of(asked("m", rows, seq=7, forward=True)))
    assert (found.model_id, found.seq_id, found.is_forward, found.loss) == ("m", 7, True, "cross_entropy")
    _, data = checked_data(found, vocabulary=10, context=8)
    for one, other in zip(rows, data, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.targets, other.targets)
        assert torch.equal(one.inputs["weights"], other.inputs["weights"])


def test_settings_are_read_from_both_maps() -> None:
    made = message("Pass", model_id="m", seq_id=1, loss="ppo")
    made.options.add(key="clip_low_threshold", value=0.5)
    text = made.settings.add(key="mode").value
    text.text = "x"
    assert read_pass(made.SerializeToString()).settings == {"clip_low_threshold": 0.5, "mode": "x"}


def test_a_sparse_tensor_has_zeros_elsewhere() -> None:
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 0.0]])
    sparse = dense.to_sparse_csr()
    made = message("Tensor", dtype=FLOAT32, shape=[3, 2])
    made.sparse.values = sparse.values().numpy().tobytes()
    made.sparse.rows = sparse.crow_indices().numpy().tobytes()
    made.sparse.columns = sparse.col_indices().numpy().tobytes()
    assert torch.equal(tensor_of(made, "weights"), dense)
    made.sparse.columns = torch.tensor([5, 0]).numpy().tobytes()
    with pytest.raises(DataError, match="weights is not a sparse tensor"):
        tensor_of(made, "weights")


def test_the_answer_of_a_pass_keeps_shapes() -> None:
    logprobs = [torch.arange(3.0), torch.arange(4.0), torch.arange(6.0).view(3, 2)]
    found = read_message("PassOutput", encoded_pass(logprobs, {"loss:sum": 1.5}))
    assert [record.count for record in found.records] == [2, 1]
    assert [list(record.columns[0].value.trailing) for record in found.records] == [[], [2]]
    first = found.records[0].columns[0].value
    assert torch.frombuffer(bytearray(first.offsets), dtype=torch.int64).tolist() == [0, 12, 28]
    assert [(each.key, each.value) for each in found.metrics] == [("loss:sum", 1.5)]


def test_samples_say_why_they_ended() -> None:
    found = read_message(
        "SampleOutput", encoded_samples([(True, [1, 2], [-0.5, -1.0]), (False, [], [])], None)
    )
    assert [each.stop for each in found.sequences] == [0, 1]
    assert torch.frombuffer(bytearray(found.sequences[0].tokens), dtype=torch.int32).tolist() == [1, 2]
    assert not found.HasField("prompt_logprobs")


def test_bytes_that_are_no_message() -> None:
    with pytest.raises(DataError, match="not a forward_backward request"):
        read_pass(b"\xff\xff\xff\xff not protobuf")


@pytest.mark.parametrize("damage", ["type", "bytes", "shape"])
def test_a_damaged_tensor(damage: str) -> None:
    made = tensor_message(torch.arange(4.0))
    if damage == "type":
        made.dtype = 9
    elif damage == "bytes":
        made.dense = b"12345"
    else:
        del made.shape[:]
        made.shape.extend([5])
    with pytest.raises(DataError, match="weights of datum 0"):
        tensor_of(made, "weights of datum 0")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("weights", torch.tensor([1.0, float("nan"), 1.0]), "weights of datum 0 is nan at"),
        ("weights", torch.ones(2), "has the shape [2]"),
        ("target_tokens", torch.tensor([1, 2, 10]), "has the token 10 at 2"),
        ("target_tokens", torch.tensor([1, -1, 2]), "has the token -1"),
        ("target_tokens", torch.ones(3), "type float32"),
        ("target_tokens", torch.tensor([1, 2]), "[3, K]"),
        ("advantages", torch.ones(3), "cross_entropy does not read"),
    ],
)
def test_datums_that_are_refused(name: str, value: torch.Tensor, words: str) -> None:
    rows = encoded([weighted([1, 2, 3, 4], 2)])
    for each in [each for each in rows[0].inputs if each.key == name]:
        rows[0].inputs.remove(each)
    rows[0].inputs.add(key=name, value=tensor_message(value))
    made = message("Pass", model_id="m", seq_id=1, loss="cross_entropy", data=rows)
    with pytest.raises(Exception, match="datum 0") as refused:
        checked_data(read_pass(made.SerializeToString()), vocabulary=10, context=8)
    assert words in str(refused.value)


def test_a_datum_without_an_input_of_its_loss_is_refused() -> None:
    with pytest.raises(DataError, match="datum 0 has no logprobs"):
        checked_data(asked("m", [datum([1, 2, 3])], "importance_sampling"), vocabulary=10, context=8)


def test_a_datum_that_is_longer_than_the_context() -> None:
    with pytest.raises(DataError, match="context is 3 tokens"):
        checked_data(asked("m", [weighted([1, 2, 3, 4, 5], 2)]), vocabulary=10, context=3)


@pytest.mark.parametrize("part", [b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\x2a\x00", b"\x0a\x00"])
def test_a_pass_of_many_small_parts_is_refused_before_it_is_parsed(part: bytes) -> None:
    with pytest.raises(DataError, match="the request has more than"):
        decoded_pass(part * 2**20)


@pytest.mark.parametrize("shape", [[50_000, 50_000], [2**40, 2**40], [-1, 4], [2, 2, 2], [4]])
def test_a_sparse_tensor_of_a_huge_shape_is_refused_before_it_is_made(shape: list[int]) -> None:
    sparse = message("SparseCsr", values=b"", rows=b"", columns=b"")
    with pytest.raises(DataError, match="has the shape"):
        tensor_of(message("Tensor", sparse=sparse, dtype=1, shape=shape), "weights of datum 0")
