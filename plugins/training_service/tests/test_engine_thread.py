"""EngineThread: fair turns, errors that end one job alone, and a failure that ends all in words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rillflow.errors import DataError, RillflowError
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import native_engine
from rillflow_parts.endpoint.engine_queue import EngineQueue
from rillflow_training_service.engine_thread import ClientJob, EngineThread, ServerError
from rillflow_training_service.service import Service

sys.path.insert(0, str(Path(__file__).parent))
from toys import toy_service


def thread_of(service: Service) -> EngineThread:
    model = service.base.model
    queue = EngineQueue(native_engine(model, RolloutConfig(max_rows=4)), model.tokenizer, max_rows=4)
    return EngineThread(service.base, service.sampler, queue)


def test_owners_take_turns_and_an_error_ends_its_job_alone(tmp_path: Path) -> None:
    thread, done, told = thread_of(toy_service(tmp_path)), list[str](), list[Any]()

    def job(name: str, error: Exception | None = None) -> ClientJob:
        def run() -> str:
            done.append(name)
            if error is not None:
                raise error
            return name

        return ClientJob(owner=name[0], run=run, tell=told.append)

    for each in (
        job("a1"),
        job("a2", DataError("odd")),
        job("a3"),
        job("b1", ZeroDivisionError()),
        job("c1"),
    ):
        thread.put(each)
    while thread.turn():
        pass
    assert done == ["a1", "b1", "c1", "a2", "a3"]
    assert [each for each in told if isinstance(each, str)] == ["a1", "c1", "a3"]
    errors = [each for each in told if isinstance(each, RillflowError)]
    assert isinstance(errors[0], ServerError) and "ZeroDivisionError" in str(errors[0])
    assert str(errors[1]) == "odd"


def test_a_broken_loop_answers_everybody(tmp_path: Path) -> None:
    service = toy_service(tmp_path)
    thread, told, ended = thread_of(service), list[Any](), list[bool]()

    def leave() -> None:
        raise KeyboardInterrupt  # no error of a job: the loop itself ends

    thread.put(ClientJob(owner="a", run=leave, tell=told.append))
    thread.put(ClientJob(owner="a", run=lambda: "never", tell=told.append))
    thread.run(lambda: ended.append(True))
    thread.put(ClientJob(owner="b", run=lambda: "never", tell=told.append))
    assert ended == [True] and len(told) == 3
    assert all(isinstance(each, ServerError) for each in told)
    assert "the engine failed, and the server stopped" in str(told[-1])
