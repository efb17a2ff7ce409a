"""Video: one evaluation episode as a short animated picture in the run directory, which the report shows.

environment.render ─ at most MOST_FRAMES frames of an episode ─ WebP ─> RUN/media/NAME.webp
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from rillflow.runs import durable, layout
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.evaluation import sampled
from rillflow_classic.fragment import Array
from rillflow_classic.workers.actor import Actor

MOST_STEPS = 1000
"""Longest filmed part of an episode."""
MOST_FRAMES = 200
"""Frames of a video; a longer episode is shown faster."""
WIDTH = 320
"""Largest width in pixels."""
FRAME_MS = 40
"""Milliseconds that a frame is shown."""


def record_video(actor: Actor, environment: VectorEnvironment, run: Path, name: str) -> Path | None:
    """Film an episode into the run directory; None if the environment shows nothing.

    Args:
        actor: plays in the environment, one step in each fragment, from the start of an episode.
        environment: one environment that can render.
        run: the run directory.
        name: name of the file, without its end.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    frames, is_over = list[Array](), False
    while (frame := environment.render(0)) is not None and len(frames) < MOST_STEPS:
        frames.append(frame)
        if is_over:
            break
        is_over = all(fragment.ended.all() for fragment in sampled(actor))
    if not frames:
        return None
    file = run / layout.MEDIA / f"{name}.webp"
    with durable.writing(file):
        file.parent.mkdir(exist_ok=True)
    durable.replace(file, [animated(frames)])
    return file


def animated(frames: Sequence[Array]) -> bytes:
    """Return frames [H, W, 3] uint8 as an animated WebP, with at most ``MOST_FRAMES`` of them."""
    every = -(-len(frames) // MOST_FRAMES)
    pictures = [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames[::every]]
    width, height = pictures[0].size
    if width > WIDTH:
        pictures = [each.resize((WIDTH, height * WIDTH // width)) for each in pictures]
    data = io.BytesIO()
    first, *rest = pictures
    first.save(data, "WEBP", save_all=True, append_images=rest, duration=FRAME_MS, loop=0, quality=60)
    return data.getvalue()
