"""The mutation study: operators make the faults of their name, and only sound tests count."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "mutation"))
from age import is_out_of_date, texts_at  # type: ignore[import-not-found]
from copies import interpreter, make_copy  # type: ignore[import-not-found]
from coverage_map import CoverageMap, carried, holds, measured, record_of  # type: ignore[import-not-found]
from operators import draw, mutants_of  # type: ignore[import-not-found]
from page import OUT_OF_DATE, interval, lines_of, page  # type: ignore[import-not-found]
from pytest_runs import Runner  # type: ignore[import-not-found]
from studied import files, is_studied, own_tests, packages  # type: ignore[import-not-found]
from study import Study, texts_of, tried  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def made(text: str) -> set[tuple[str, str]]:
    """Return kinds and changed lines of a snippet's mutants."""
    found = set()
    for mutant in mutants_of("snippet.py", text):
        if not mutant.parses(text):
            continue
        changed = mutant.applied(text)
        ast.parse(changed)
        lines = zip(text.splitlines(), changed.splitlines(), strict=True)
        found.add((mutant.kind, next(new.strip() for old, new in lines if old != new)))
    return found


@pytest.mark.parametrize(
    ("text", "kind", "changed"),
    [
        ("x = a < b", "comparison", "x = (a <= b)"),
        ("x = a in b", "comparison", "x = (a not in b)"),
        ("x = a + b", "operator", "x = ((a) - (b))"),
        ("x = a // b", "operator", "x = ((a) * (b))"),
        ("x = a and b or c", "and or", "x = ((a) or (b)) or c"),
        ("x = not a", "sign", "x = (a)"),
        ("x = 3", "constant", "x = 4"),
        ("x = 3", "constant", "x = (2)"),
        ("x = True", "constant", "x = False"),
        ("x = 0.5", "constant", "x = 1.0"),
        ("x = min(a, b)", "min max", "x = max(a, b)"),
        ("x = f(a, b=c)", "argument dropped", "x = f(a)"),
        ("if a: b()", "condition negated", "if (not (a)): b()"),
        ("x = [a for a in b if c]", "condition negated", "x = [a for a in b if (not (c))]"),
        ("x = a + b", "operand dropped", "x = (b)"),
        ("x = a and b and c", "operand dropped", "x = (a and c)"),
        ("x = f(a, b, c)", "arguments swapped", "x = f(a, c, b)"),
        ("x = f(a)", "call deleted", "x = (a)"),
        ("a.append(b)", "call deleted", "pass"),
        ("def f() -> bool: return a", "return value", "def f() -> bool: return (not (a))"),
        ("def f() -> int: return a", "return value", "def f() -> int: return ((a) + 1)"),
        ("def f() -> list[int]: return a", "return value", "def f() -> list[int]: return []"),
        ("def f() -> Box: return a", "return value", "def f() -> Box: return None"),
        ("while a: break", "break continue", "while a: continue"),
        ("while a: continue", "break continue", "while a: break"),
        (
            "x = Field(0.2, ge=0, description=f'{a}')",
            "argument dropped",
            "x = Field(0.2, description=f'{a}')",
        ),
        ("a.b = c", "statement removed", "pass"),
        ("a += b", "statement removed", "pass"),
        ("if a: raise ValueError(1)", "statement removed", "if a: pass"),
        ("ä = 'ü'; x = a < b", "comparison", "ä = 'ü'; x = (a <= b)"),  # columns are bytes
    ],
)
def test_a_fault_of_every_kind_is_made(text: str, kind: str, changed: str) -> None:
    assert (kind, changed) in made(text)


@pytest.mark.parametrize(
    "text",
    [
        '"""Three words, 3."""',
        "def f(a: Literal[3], b: int | None) -> Box[4]: ...",
        "x = f'{a + 3}'",
        "x = ConfigError('wrong', why='it is 3')",
        "@dataclass(frozen=True)\nclass A: ...",
        "x = y.to(device=device)",
        "x = 'a' + b",
    ],
)
def test_words_annotations_and_decorators_are_left_alone(text: str) -> None:
    assert made(text) == set()


def test_a_removed_raise_takes_its_words_with_it_and_no_other_fault_is_in_them() -> None:
    assert made("raise ValueError(a + 1)") == {("statement removed", "pass")}


@pytest.mark.parametrize(("new", "line"), [("pass", 5), ("raise", 5)])
def test_the_body_of_an_except_is_replaced_whole(new: str, line: int) -> None:
    text = "try:\n    a()\nexcept KeyError:\n    b = 1\n    c()\n"
    bodies = {m.new: m.applied(text) for m in mutants_of("snippet.py", text) if m.kind == "except body"}
    assert bodies[new] == f"try:\n    a()\nexcept KeyError:\n    {new}\n"


def test_a_draw_is_uniform_over_lines_and_begins_with_the_draw_of_fewer() -> None:
    texts = {"a.py": "x = f(a, b, c) + g(d, e) * 3\n" + "y = 1\n" * 9}
    assert draw(texts, 4, 7) == draw(texts, 10, 7)[:4]
    assert sorted(mutant.line for mutant in draw(texts, 10, 7)) == list(range(1, 11))
    firsts = Counter(draw(texts, 1, seed)[0].line == 1 for seed in range(400))
    assert 15 <= firsts[True] <= 75, "one line of ten, though it has most of the mutants"


def test_a_mutant_is_known_by_its_line_and_place() -> None:
    one, other = (mutant for mutant in mutants_of("a.py", "x = 1\ny = 1\n") if mutant.new == "2")
    assert one.name != other.name
    moved = next(mutant for mutant in mutants_of("a.py", "# more\nx = 1\ny = 1\n") if mutant.new == "2")
    assert (moved.name, moved.line) == (one.name, 2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Yield a warm pytest process in a small repository with one module and its tests."""
    source = tmp_path_factory.mktemp("source")
    code = ("tests/unit/sums", "rillflow/sums", "plugins/extra/rillflow_extra", "plugins/extra/tests")
    for name in (*code, "benchmarks", "recipes", "examples", "docs", "clusters"):
        (source / name).mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "LICENSE", "constraints.txt", "Makefile"):
        (source / name).touch()
    shutil.copy2(ROOT / "pyproject.toml", source)
    for folder in ("rillflow", "rillflow/sums", "plugins/extra/rillflow_extra"):
        (source / folder / "__init__.py").touch()
    (source / "plugins/extra/rillflow_extra/add.py").write_text(ADD)
    (source / "plugins/extra/tests/test_extra.py").write_text(EXTRA_TESTS)
    (source / "rillflow/sums/add.py").write_text(ADD)
    (source / "tests/unit/sums/test_add.py").write_text(TESTS)
    runner = Runner(make_copy(source, tmp_path_factory.mktemp("copies") / "copy"))
    yield runner
    runner.close()


ADD = """def add(a, b):
    return a + b


def unused(a, b):
    return a * b


def child(a, b):
    return a - b
"""
TESTS = """import multiprocessing, subprocess, sys
from pathlib import Path
from rillflow.sums.add import add

def test_red_without_a_fault():
    assert add(1, 1) == 3

def test_red_too():
    assert add(1, 1) == 4

def test_red_beside_a_fault_of_its_own():  # passes once, then never: a flaky test
    seen = Path("flaky.txt")
    assert add(1, 1) and not seen.exists()
    seen.touch()

def test_a_child_finds_the_copy():
    code = "import rillflow.sums.add as add; print(add.__file__) if add.child(3, 2) == 1 else 1"
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(Path.cwd())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(add, (2, 3)) == add(1, 4)

def test_sum():
    assert add(2, 2) == 4
    assert add(2, 3) == 5
"""
EXTRA_TESTS = """from rillflow_extra.add import add

def test_extra():
    assert add(2, 3) == 5
"""
SUM = "tests/unit/sums/test_add.py::test_sum"
CHILD = "tests/unit/sums/test_add.py::test_a_child_finds_the_copy"


def coverage_of(small: Runner, folder: Path) -> CoverageMap:
    """Return the map of the small repository's one test file."""
    (small.copy / "flaky.txt").unlink(missing_ok=True)
    return measured(small, ["tests/unit/sums/test_add.py"], folder)


def test_every_red_test_of_the_coverage_run_is_no_witness(small: Runner, tmp_path: Path) -> None:
    found = coverage_of(small, tmp_path)
    names = {test.split("::")[1] for test in found.tests("rillflow/sums/add.py", 2)}
    assert names == {"test_red_beside_a_fault_of_its_own", "test_a_child_finds_the_copy", "test_sum"}


def test_a_flaky_test_sees_nothing(small: Runner, tmp_path: Path) -> None:
    coverage = coverage_of(small, tmp_path)
    mutants = mutants_of("rillflow/sums/add.py", ADD)
    fault = next(mutant for mutant in mutants if mutant.line == 2 and mutant.kind == "operator")
    line = tried(Study(runner=small, coverage=coverage, patience=4.0), fault)
    assert line["seen_by"] in (SUM, CHILD)
    assert (small.copy / "rillflow/sums/add.py").read_text() == ADD


def test_a_line_that_only_a_child_runs_has_its_tests_as_witnesses(small: Runner, tmp_path: Path) -> None:
    coverage = coverage_of(small, tmp_path)
    assert coverage.tests("rillflow/sums/add.py", 10)[0] == CHILD
    mutants = mutants_of("rillflow/sums/add.py", ADD)
    fault = next(mutant for mutant in mutants if mutant.line == 10 and mutant.kind == "operator")
    assert tried(Study(runner=small, coverage=coverage, patience=4.0), fault)["seen_by"] == CHILD


def test_a_fault_in_a_plugin_is_noticed_by_the_plugins_tests(small: Runner, tmp_path: Path) -> None:
    path, test = "plugins/extra/rillflow_extra/add.py", "plugins/extra/tests/test_extra.py"
    assert {path, "rillflow/sums/add.py"} < texts_of(small.copy).keys()
    coverage = measured(small, [test], tmp_path)
    fault = next(each for each in mutants_of(path, ADD) if each.line == 2 and each.kind == "operator")
    line = tried(Study(runner=small, coverage=coverage, patience=4.0), fault)
    assert line["seen_by"] == f"{test}::test_extra"


def test_code_and_its_own_tests_are_known_by_their_paths() -> None:
    paths = [str(file.relative_to(ROOT)) for file in files(ROOT)]
    assert all(map(is_studied, paths)) and not is_studied("plugins/planner/tests/test_search.py")
    assert {(ROOT / own_tests(path)).exists() for path in paths if len(Path(path).parts) > 2} == {True}
    assert {package.name for package in packages(ROOT)} >= {"rillflow", "rillflow_parts", "rillflow_planner"}
    assert own_tests("rillflow_parts/watch/server.py") == "tests/parts/watch/"
    assert not is_studied("plugins/README.md")


def test_code_that_no_test_runs_survives(small: Runner, tmp_path: Path) -> None:
    coverage = coverage_of(small, tmp_path)
    fault = next(mutant for mutant in mutants_of("rillflow/sums/add.py", ADD) if mutant.line == 6)
    assert tried(Study(runner=small, coverage=coverage, patience=4.0), fault)["seen_by"] == ""


def test_a_record_of_coverage_follows_the_code_and_ends_with_its_test(small: Runner, tmp_path: Path) -> None:
    coverage_of(small, tmp_path)
    record = record_of("tests/unit/sums/test_add.py", tmp_path)
    file, test = small.copy / "rillflow/sums/add.py", small.copy / "tests/unit/sums/test_add.py"
    file.write_text("# one line more\n" + ADD)
    try:
        assert holds(record, small.copy, tmp_path)
        assert SUM in coverage_of(small, tmp_path).lines["rillflow/sums/add.py"][3]
        test.write_text(TESTS + "\n")
        assert not holds(record, small.copy, tmp_path)
    finally:
        file.write_text(ADD)
        test.write_text(TESTS)


def test_lines_keep_their_tests_when_the_code_around_them_changes() -> None:
    assert carried("a\nb\nc\n", "x\na\nb\nc\n") == {1: [1, 2], 2: [3], 3: [4]}
    assert carried("a\nb\nc\n", "a\nnew\nnewer\nc\n") == {1: [1, 2, 3], 2: [2, 3], 3: [2, 3, 4]}
    assert carried("a\nb\nc\n", "a\nc\n") == {1: [1], 2: [], 3: [2]}


def test_a_test_without_end_is_named_and_killed(small: Runner, tmp_path: Path) -> None:
    test = small.copy / "tests/unit/sums/test_endless.py"
    test.write_text("import time\n\ndef test_endless():\n    time.sleep(1000)\n")
    outcome = small.run(["tests/unit/sums/test_endless.py"], 5.0, "-x")
    test.unlink()
    assert (outcome.ended, outcome.first_red.split("::")[1]) == ("time limit", "test_endless")
    assert interpreter(small.copy).exists()


def test_the_interval_is_wilsons() -> None:
    low, high = interval(123, 141)  # scipy.stats.binomtest(123, 141).proportion_ci(method="wilson")
    assert (low, high) == (pytest.approx(0.80723, abs=1e-4), pytest.approx(0.91770, abs=1e-4))


def test_the_page_is_written_from_its_lines() -> None:
    argued = tomllib.loads((RESULTS / "mutation_equivalent.toml").read_text())
    stored = (RESULTS / "mutation.md").read_text()
    written = page(lines_of(RESULTS / "mutation.jsonl"), argued, is_old=OUT_OF_DATE in stored)
    assert stored == written, "run: python benchmarks/mutation --page"


def test_mutants_that_are_tried_before_their_turn_do_not_count() -> None:
    line = {"commit": "a", "seed": 1, "round": "wide", "file": "rillflow/sums/add.py", "line": 2}
    line |= {"operator": "constant", "before": "1", "after": "2"}
    lines = [
        {**line, "place": place, "name": str(place), "seen_by": "test" * (place != 1)} for place in (0, 1, 3)
    ]
    written = page(lines, {}, is_old=False)
    assert "`python benchmarks/mutation --mutants 2 --seed 1`" in written
    assert "Tests saw 1 of the other 2: **50%**" in written
    assert "1 of them change nothing" in page(lines, {"1": "a reason"}, is_old=False)


def test_arguments_of_equivalence_are_of_code_that_the_study_had() -> None:
    argued = tomllib.loads((RESULTS / "mutation_equivalent.toml").read_text())
    files = {name.split(": ")[0] for name in argued}
    (commit,) = {line["commit"] for line in lines_of(RESULTS / "mutation.jsonl")}
    texts = [(file, text) for file, text in texts_of_study(commit) if file in files]
    names = {mutant.name for file, text in texts for mutant in mutants_of(file, text)}
    assert set(argued) - names == set(), "remove the entries"


def texts_of_study(commit: str) -> list[tuple[str, str]]:
    """Return path and text of the code at a commit; skip the test if git does not know it."""
    try:
        return list(texts_at(commit, ROOT))
    except LookupError as error:
        pytest.skip(str(error))


def test_an_unknown_commit_is_named() -> None:
    with pytest.raises(LookupError, match="does not know the study's commit 0000000"):
        list(texts_at("0000000", ROOT))


def test_a_study_is_out_of_date_from_a_third_of_changed_lines_on(tmp_path: Path) -> None:
    """Nine lines; two that are replaced count four times, and comments not at all."""
    file = tmp_path / "rillflow" / "sums.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").touch()
    file.write_text("".join(f"x{place} = {place}\n" for place in range(9)))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *words], check=True)
    file.write_text("# new\n" + file.read_text().replace("x0 = 0", "y = 0"))
    assert not is_out_of_date("HEAD", tmp_path), "two of nine"
    file.write_text(file.read_text().replace("x1 = 1", "y = 1"))
    assert is_out_of_date("HEAD", tmp_path), "four of nine"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mutation", "mutation_ground"])
def test_a_page_says_whether_its_study_is_out_of_date(name: str) -> None:
    (commit,) = {line["commit"] for line in lines_of(RESULTS / f"{name}.jsonl")}
    texts_of_study(commit)
    stated = OUT_OF_DATE in (RESULTS / f"{name}.md").read_text()
    assert stated == is_out_of_date(commit, ROOT), "run: python benchmarks/mutation --page --lines ..."
