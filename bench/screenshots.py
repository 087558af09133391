"""Pages as pictures: a headless Chromium, found on PATH."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

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
    # Fewer colours merge those of thin lines.
    cut.quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def _used_height(image: object) -> int:
    """Return the height of the page without the empty part below it."""
    from PIL import Image, ImageChops

    assert isinstance(image, Image.Image)
    ground = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, ground).getbbox()
    return min(image.height, box[3] + 24) if box else image.height
