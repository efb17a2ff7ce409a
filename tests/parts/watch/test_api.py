"""The API of the local page over a run that is written meanwhile, and requests that are wrong or hostile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from rillflow.records.metrics import Mean
from rillflow.runs import layout
from rillflow.runs.curves import MetricColumns
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from tests.parts.watch.conftest import STEPS, TOKEN, WrittenRun, rows_of
from tests.unit.written_rollouts import write_rollouts

Get = Callable[..., Any]


def test_a_running_run_is_listed_with_its_headline(get: Get) -> None:
    (run,) = get("/api/runs")
    assert (run["run"], run["recipe"], run["algorithm"]) == ("first", "a.toml", "grpo")
    assert (run["state"], run["steps"], run["of_steps"]) == ("running", STEPS, 10)
    assert run["headline"] == {"name": "held-out accuracy", "value": 0.6, "interval": [0.0, 1.0]}
    assert run["problems"] == []


def test_a_run_without_a_driver_is_stopped_and_one_with_its_last_step_finished(
    get: Get, written: WrittenRun
) -> None:
    written.directory.close()
    assert get("/api/runs")[0]["state"] == "stopped"
    (written.path / layout.FINISHED).write_text("{}")
    assert get("/api/runs")[0]["state"] == "finished"
    written.open()


def test_the_summary_has_settings_evaluations_and_metrics(get: Get) -> None:
    found = get("/api/runs/first")
    assert found["config"]["policy.lr"] == 1e-4
    assert [(each["step"], each["tokens"]) for each in found["evaluations"]] == [(3, 60.0), (6, 120.0)]
    assert found["phases"] == [{"name": "grpo", "first": 1, "last": STEPS}]
    kinds = {each["name"]: each["reduction"] for each in found["metrics"]}
    assert kinds["reward/score/mean"] == "mean" and kinds["staleness/versions/histogram"] == "histogram"
    assert "rise" in next(each["help"] for each in found["metrics"] if each["name"] == "reward/score/mean")


def test_curves_over_steps_seconds_and_tokens(get: Get) -> None:
    asked = {"runs": "first", "metrics": "reward/score/mean,policy/ratio/max"}
    reward, ratio = get("/api/curves", **asked)["curves"]
    assert reward["x"] == [1, 2, 3, 4, 5, 6] == reward["y"] and reward["is_full"]
    assert ratio["y"][1] is None, "an infinite value is no number in JSON"
    assert get("/api/curves", **asked, x="tokens")["curves"][0]["x"] == [20, 40, 60, 80, 100, 120]
    assert get("/api/curves", **asked, x="seconds")["curves"][0]["x"] == [3, 6, 9, 12, 15, 18]
    few = get("/api/curves", **asked, points=2)["curves"][0]
    assert (few["x"], few["y"], few["low"], few["high"]) == ([2, 5], [2, 5], [1, 4], [3, 6])
    near = get("/api/curves", **asked, **{"from": 3, "to": 4})["curves"][0]
    assert near["x"] == [2, 3, 4, 5], "one more on each side, so that the line reaches the edges"


def test_a_growing_run_grows_here(get: Get, written: WrittenRun) -> None:
    asked = {"runs": "first", "metrics": "reward/score/mean"}
    assert len(get("/api/curves", **asked)["curves"][0]["x"]) == STEPS
    file = written.path / layout.METRICS
    with file.open("ab") as opened:
        opened.write(b'{"step": 7, "phase": "grpo", ')
    assert len(get("/api/curves", **asked)["curves"][0]["x"]) == STEPS, "half a line is not there yet"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - len(b'{"step": 7, "phase": "grpo", '))
    written.step(7)
    assert get("/api/curves", **asked)["curves"][0]["y"][-1] == 7
    assert get("/api/rollouts", run="first", q="answer 70")["total"] == 1


def test_a_rewound_run_is_read_again(get: Get, written: WrittenRun) -> None:
    asked = {"runs": "first", "metrics": "reward/score/mean"}
    assert get("/api/rollouts", run="first", q="answer 60")["total"] == 1
    assert len(get("/api/curves", **asked)["curves"][0]["x"]) == STEPS
    written.directory.rewind(4)
    assert get("/api/curves", **asked)["curves"][0]["y"] == [1, 2, 3, 4]
    assert get("/api/rollouts", run="first", q="answer 60")["total"] == 0
    written.step(5, score=-1.0)
    assert get("/api/curves", **asked)["curves"][0]["y"] == [1, 2, 3, 4, -1]
    assert get("/api/rollouts", run="first")["total"] == 5 * 6
    assert get("/api/timeline", run="first")["last"] == 5


def test_a_damaged_line_is_told_and_the_rest_is_shown(get: Get, written: WrittenRun) -> None:
    file = written.path / layout.METRICS
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], b"garbage\n", b'{"step": 1e999}\n', *lines[2:]]))
    (written.path / layout.CONFIG).write_text("{")
    found = get("/api/runs/first")
    assert any("metrics.jsonl line 3 is not a JSON object" in each for each in found["problems"])
    assert any("config.json is not a JSON object" in each for each in found["problems"])
    assert len(get("/api/curves", runs="first", metrics="reward/score/mean")["curves"][0]["x"]) == STEPS


def test_numbers_that_json_lacks_are_null(get: Get, written: WrittenRun) -> None:
    found = Evaluation(correct=1, count=2, mean_reward=0.5, more={"proxy_mean": float("nan")})
    written.directory.log_evaluation(6, found)
    write_rollouts(written.path, 7, [{**rows_of(7)[0], "parts": {"style": float("inf")}}])
    assert get("/api/runs/first")["evaluations"][-1]["more"]["proxy_mean"] is None
    assert get("/api/rollout", run="first", step=7, epoch=2, prompt=0, sample=0)["parts"] == {"style": None}


def test_a_damaged_rollout_file_is_an_error_in_words(client: TestClient, written: WrittenRun) -> None:
    layout.rollout_file(written.path, 2, 1, 1).write_bytes(b"nothing")
    found = client.get("/api/rollout?run=first&step=2&epoch=0&prompt=0&sample=0")
    assert found.status_code == 500 and "cannot read" in found.json()["error"]["what"]
    (written.path / layout.SPANS).chmod(0o000)
    assert client.get("/api/timeline?run=first").status_code in (200, 404), "root may read everything"


def test_a_deleted_run_is_gone_and_the_others_stay(get: Get, client: TestClient, written: WrittenRun) -> None:
    other = WrittenRun.new(written.path.with_name("second"), steps=1)
    other.directory.close()
    assert [run["run"] for run in get("/api/runs")] == ["first", "second"]
    shutil.rmtree(other.path)
    assert [run["run"] for run in get("/api/runs")] == ["first"]
    assert client.get("/api/runs/second").status_code == 404
    assert client.get("/api/rollouts?run=second&q=a").status_code == 404


def test_runs_of_one_name_have_different_names_here(get: Get, written: WrittenRun) -> None:
    other = WrittenRun.new(written.path.parent / "sweep" / "first", steps=1)
    other.directory.close()
    assert {run["run"] for run in get("/api/runs")} == {"first", "sweep~first"}
    differences = get("/api/configs", runs="first,sweep~first")
    assert differences == {"same": 3, "differences": []}


def test_a_name_may_have_a_comma(get: Get, written: WrittenRun) -> None:
    name = written.path.with_name("DPO, 50% longer")
    WrittenRun.new(name, steps=1).directory.close()
    asked = "DPO%2C 50%25 longer,first"
    found = get("/api/curves", runs=asked, metrics="reward/score/mean")["curves"]
    assert [curve["run"] for curve in found] == ["DPO, 50% longer", "first"]
    assert get("/api/runs/DPO, 50% longer")["steps"] == 1


def test_rows_are_searched_filtered_and_sorted(get: Get) -> None:
    found = get("/api/rollouts", run="first", q="STRASSE", limit=2)
    assert found["total"] == 3 * STEPS and found["is_total_exact"] and len(found["rows"]) == 2
    row = found["rows"][0]
    assert (row["step"], row["prompt_text"], row["prompt_marks"]) == (6, "Spell STRASSE.", [[6, 13]])
    assert get("/api/rollouts", run="first", q="4", step="3-4", finish="length")["total"] == 2
    assert get("/api/rollouts", run="first", outcome="error", step="-2")["total"] == 2
    assert get("/api/rollouts", run="first", reward_min=1)["total"] == 2 * STEPS
    best = get("/api/rollouts", run="first", sort="-reward", limit=1)["rows"][0]
    assert (best["reward"], best["advantage"], best["version_max"]) == (1.0, 0.5, 0)
    second = get("/api/rollouts", run="first", sort="step", offset=6, limit=1)["rows"][0]
    assert (second["step"], second["prompt"], second["sample"]) == (2, 0, 0)
    assert get("/api/rollouts", run="first", q="says")["total"] == STEPS, "what a tool said is found"


def test_a_row_has_its_tokens_and_its_group(get: Get) -> None:
    row = get("/api/rollout", run="first", step=4, epoch=1, prompt=1, sample=2)
    assert [(each["text"], each["is_sampled"], each["version"]) for each in row["tokens"]] == [
        *(("Q", False, None), (" call", True, 3), ("TOOL", False, None), (" says", False, None)),
        (" done", True, 3),
    ]
    assert [each["logprob"] for each in row["tokens"]] == [None, -0.5, None, None, -0.5]
    assert [each["sample"] for each in row["groups"]] == [0, 1]
    assert (row["columns"], row["message"], row["length"]) == ({"answer": "5"}, "", 2)
    failed = get("/api/rollout", run="first", step=4, epoch=1, prompt=0, sample=1)
    assert (failed["reward"], failed["outcome"], failed["message"]) == (None, "error", "it raised")


def test_answers_of_a_prompt_over_time(get: Get) -> None:
    found = get("/api/prompt", run="first", epoch="*", prompt=0)
    assert [each["step"] for each in found["steps"]] == [1, 2, 3, 4, 5, 6]
    assert [row["completion"] for row in found["steps"][1]["rows"]] == ["2", "3", "4"]
    assert [each["step"] for each in get("/api/prompt", run="first", epoch=1, prompt=0)["steps"]] == [3, 4, 5]


def test_the_timeline_has_work_and_waits(get: Get) -> None:
    found = get("/api/timeline", run="first", **{"from": 2, "to": 3})
    (lane,) = found["lanes"]
    assert lane["name"] == "main 0"
    assert [(bar["kind"], bar["name"], bar["step"]) for bar in lane["bars"] if bar["kind"] == "stage"] == [
        *(("stage", "policy.generate", 2), ("stage", "policy.update", 2)),
        *(("stage", "policy.generate", 3), ("stage", "policy.update", 3)),
    ]
    assert (found["start_s"], found["end_s"], found["steps"]) == (3.0, 8.5, [1, STEPS])


def test_what_is_not_there_is_not_found(client: TestClient) -> None:
    paths = [
        *("/assets/..%2f..%2fserver.py", "/assets/../server.py", "/assets/%2e%2e%2f%2e%2e%2fetc%2fpasswd"),
        *("/api/runs/..", "/api/runs/..%2f..%2fetc", "/api/runs/%00", "/api/curves?runs=../first&metrics=a"),
        *("/api/rollouts?run=/etc/passwd", "/api/rollout?run=first&step=999&epoch=0&prompt=0&sample=0"),
        *("/api/prompt?run=first&prompt=123456", "/api/timeline?run=first&from=100&to=200"),
        *("/api/rollout?run=first&step=1&epoch=5&prompt=0&sample=0", "/api/nothing"),
    ]
    for path in paths:
        found = client.get(path)
        assert found.status_code == 404, path
        assert "passwd:" not in found.text and "def " not in found.text


def test_wrong_values_are_refused_with_their_name(client: TestClient) -> None:
    rollouts, row = "/api/rollouts?run=first", "/api/rollout?run=first"
    asked = {
        "/api/curves?runs=first": [
            *("x=miles", "points=0", "points=99999999", "from=nan", "to=1e999"),
            "metrics=" + ",".join("a" * 300),
        ],
        rollouts: [
            *("step=a-b", "limit=100000", "offset=-1", "sort=size", "reward_min=big", "prompt=one"),
            *("q=" + "a" * 2000, "step=" + "9" * 40),
        ],
        row: ["", "step=1&epoch=0&prompt=0&sample=" + "9" * 30],
        "/api/prompt?run=first": ["prompt=x", "prompt="],
        "/api/timeline?run=first": ["from=x", "to=1.5"],
    }
    for path, wrong in asked.items():
        for parameters in wrong:
            found = client.get(f"{path}&{parameters}")
            assert found.status_code == 400, (path, parameters)
            assert found.json()["error"]["what"] and found.json()["error"]["why"]


def test_odd_queries_are_answered(get: Get) -> None:
    for text in ("%", "[", "(", "\\", "é", "\U0001f600", "a\nb", "ſ"):
        assert get("/api/rollouts", run="first", q=text)["total"] == 0
    assert get("/api/rollouts", run="first", step="0-9007199254740991")["total"] == 6 * STEPS
    assert get("/api/rollouts", run="first", step="5-2")["total"] == 0


def test_nothing_is_answered_without_the_token(client: TestClient) -> None:
    for given in (None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", "Bearer ", "Bearer \xff"):
        del client.headers["Authorization"]
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        for path in ("/", "/api/runs", "/assets/page.js", "/api/events?runs=first", "/nothing"):
            found = client.get(path, headers=headers)
            assert found.status_code == 401 and "token" in found.json()["error"]["what"]
        client.headers["Authorization"] = ""


def test_the_token_in_the_address_becomes_a_cookie(client: TestClient) -> None:
    del client.headers["Authorization"]
    found = client.get(f"/?run=first&token={TOKEN}", follow_redirects=False)
    assert (found.status_code, found.headers["location"]) == (303, "/?run=first")
    cookie = found.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "rillflow_watch_8100=" in cookie
    assert client.get("/api/runs").status_code == 200, "the cookie is enough"
    outside = client.get(f"//evil.example/?token={TOKEN}", follow_redirects=False)
    assert not outside.headers.get("location", "").startswith("//")
    page = client.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


def test_only_reading_is_possible(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/api/runs").status_code == 405


def test_watching_leaves_the_run_directory_as_it_is(get: Get, written: WrittenRun) -> None:
    def state() -> list[tuple[str, int, int]]:
        files = sorted(written.path.rglob("*"))
        return [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]

    before = state()
    for path in ("/api/runs", "/api/runs/first"):
        get(path)
    get("/api/rollouts", run="first", q="a")
    get("/api/timeline", run="first")
    assert state() == before


def test_the_steps_of_the_last_phase_leave_out_those_of_a_warm_start(tmp_path: Path) -> None:
    """A run with a warm start and one without then begin at the same place."""
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step in range(1, 8):
            name = "grpo" if step > 3 else "warm_start"
            run.log_metrics(step, name, {"x/y/mean": Mean(total=float(step), count=1)})
    columns = MetricColumns(tmp_path / "run")
    columns.update()
    curve = columns.curve("x/y/mean", "phase")
    assert curve.x.tolist() == [1, 2, 3, 4] and curve.y.tolist() == [4, 5, 6, 7]
    assert columns.before_last_phase == 3


def test_a_run_tells_the_axis_of_the_phase_and_the_titles_of_the_report(get: Get) -> None:
    (name,) = [run["run"] for run in get("/api/runs")]
    asked = {"runs": name, "metrics": "reward/score/mean"}
    assert get("/api/curves", **asked, x="phase")["curves"][0]["x"] == [1, 2, 3, 4, 5, 6]
    told = get(f"/api/runs/{name}")
    titles = {each["name"]: each["title"] for each in told["metrics"]}
    assert titles["reward/score/mean"] == "Reward"
    assert [each["phase"] for each in told["evaluations"]] == [each["step"] for each in told["evaluations"]]
