"""Server needs: contradictions between the settings of rewards and judges over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from rillflow.app.reward_needs import compares
from rillflow.app.sections import Recipe
from rillflow.errors import ConfigError
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import SCHEMES, is_url


def server_needs(recipe: Recipe) -> Iterator[ConfigError]:
    """Yield every contradiction between the settings of servers."""
    yield from _rewards(recipe.reward)
    yield from _judge(recipe.reward)


def url_problem(setting: str, url: str) -> ConfigError | None:
    """Return what is wrong with a setting that is an address; None if nothing is."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        why = "it must be an address like http://localhost:8000/score"
        return ConfigError(f"{setting} is {url!r}", why=why, fix="write scheme and host")
    if "@" in parts.netloc:
        return ConfigError(
            f"{setting} has a password for {parts.hostname}",
            why="the run directory records the address",
            fix='name an environment variable with the key: key_variable = "MY_KEY"',
        )
    return None


def _rewards(config: RewardConfig) -> Iterator[ConfigError]:
    urls = [
        (f"reward.functions has {text!r}, which", text) for text in filter(is_url, config.functions or ())
    ]
    urls += [("reward.url", config.url)] if config.url is not None else []
    yield from filter(None, (url_problem(setting, url) for setting, url in urls))
    if config.key_variable is not None and not urls:
        yield ConfigError(
            f"reward.key_variable is {config.key_variable!r}, and no reward has a url",
            why="the key is sent to a server that scores",
            fix="set reward.url, or remove reward.key_variable",
        )


def _judge(config: RewardConfig) -> Iterator[ConfigError]:
    judge = config.judge
    if judge is None or judge.url is None or judge.model is not None:
        return
    yield from filter(None, [url_problem("reward.judge.url", judge.url)])
    if judge.model_name is None:
        yield ConfigError(
            f"reward.judge.url is {judge.url!r}, and reward.judge.model_name is not set",
            why="a request to a chat endpoint names the model",
            fix='set reward.judge.model_name = "..."; the server lists its models at /v1/models',
        )
    if judge.frame is not None and judge.frame.chat:
        yield ConfigError(
            "reward.judge.frame.chat is true, and reward.judge.url is set",
            why="the server applies the chat template to every request",
            fix="remove reward.judge.frame.chat",
        )
    if compares(judge) and (judge.compare == "tournament" or config.workers > 1):
        yield ConfigError(
            f"reward.judge.compare is {judge.compare!r} and reward.workers is {config.workers}",
            why="a judge over HTTP asks for all pairs of a prompt at once, from one worker",
            fix='set reward.judge.compare = "group" and reward.workers = 1, and raise http.concurrency',
        )
