"""Pages as pictures: a headless Chromium, found on PATH."""

from __future__ import annotations

import io
import re
import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Without the user's profile and without network traffic.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class NoBrowserError(Exception):
    """No browser on PATH, or the browser drew no page; the message is one line."""


def find_browser() -> str:
    """Return the path of the browser. Raises NoBrowserError."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    raise NoBrowserError(f"no browser: none of {', '.join(NAMES)} is on PATH")


def save_picture(png: bytes, picture: Path, *, most: int = 0) -> None:
    """Write a PNG again with at most 256 colours, without the empty part below the page, cut at `most` pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        drawn = image.convert("RGB")
    height = _used_height(drawn)
    cut = drawn.crop((0, 0, drawn.width, min(height, most) if most else height))
    # The commonest colours, and those of lines, which are too thin to be common.
    named = _named_colours()
    method = Image.Quantize.MAXCOVERAGE
    common = cut.quantize(256 - len(named), method=method, dither=Image.Dither.NONE)
    palette = np.zeros(768, np.uint8)
    shared = common.getpalette() or []
    palette[: len(shared)] = shared
    palette[768 - named.size :] = named.flatten()
    pixels, indices = np.asarray(cut), np.array(common)
    for number, colour in enumerate(named, 256 - len(named)):
        indices[(pixels == colour).all(axis=2)] = number
    few = Image.fromarray(indices)
    few.putpalette(palette.tobytes())
    few.save(picture, optimize=True)


def _named_colours() -> npt.NDArray[np.uint8]:
    """Return the red, green and blue of each colour of the pages' style sheet, light and dark: [colours, 3]."""
    style = resources.files("loraplex.gateway.page").joinpath("colours.css").read_text(encoding="utf-8")
    named = bytes.fromhex("".join(re.findall(r": #(\w{6})", style)))
    return np.frombuffer(named, np.uint8).reshape(-1, 3)


def _used_height(image: object) -> int:
    """Return the height of the page without the empty part below it."""
    from PIL import Image, ImageChops

    assert isinstance(image, Image.Image)
    ground = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, ground).getbbox()
    return min(image.height, box[3] + 24) if box else image.height
