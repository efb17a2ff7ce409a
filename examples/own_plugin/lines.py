"""An observer with settings: a line for every step, in the file that [run.lines] names."""

from pathlib import Path

from rillflow.app.plugins import Plugin


class Lines:
    """Each method is called in the driver and returns quickly, because training waits for it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def write(self, *words: object) -> None:
        with self.file.open("a") as out:
            print(*words, file=out)

    def start(self) -> None:  # config.json and environment.json are written
        self.write("start")

    def step(self, step, phase, metrics) -> None:  # its line in metrics.jsonl is written
        self.write("step", step, phase, len(metrics) > 0)

    def evaluation(self, step, found) -> None:
        self.write("evaluation", step, found.count)

    def finish(self, state) -> None:  # "finished", "stopped" or "failed"
        self.write(state)


def observers(run):  # run.path, recipe, base, say
    from lines_settings import LinesConfig

    from rillflow.app.plugin_sections import section_of

    settings = section_of(run.recipe, "run.lines", LinesConfig)
    return [] if settings is None else [Lines(run.path / settings.file)]


def needs(resolved):
    from lines_settings import LinesConfig

    from rillflow.app.plugin_sections import section_of
    from rillflow.errors import ConfigError

    settings = section_of(resolved.recipe, "run.lines", LinesConfig)
    if settings is not None and settings.file == "metrics.jsonl":
        yield ConfigError(
            'run.lines.file is "metrics.jsonl"', why="the run writes it", fix="name another file"
        )


def look(facts, report):
    report.say("lines", [f"a line for each step of {facts.recipe.algorithm.name}"])


PLUGIN = Plugin(
    sections={"run.lines": "lines_settings:LinesConfig"},
    may_change=["run.lines"],
    observers=observers,
    needs=needs,
    look=look,
)
