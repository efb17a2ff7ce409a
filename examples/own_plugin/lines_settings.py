"""Settings of the observer; ranks and checks import them without the observer."""

from pydantic import Field

from rillflow.config.schema import Section


class LinesConfig(Section):
    """Lines of a run."""

    file: str = Field(description="File, relative to the run directory.")
