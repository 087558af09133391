"""The pictures of the load-test page and the gateway's: all there, small enough, and named by what is run for them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench import page_pictures, pictures
from bench.screenshots import NoBrowserError, find_browser, save_picture

DOCS = Path(__file__).parents[2] / "docs"


def test_every_picture_of_the_pages_is_there_and_small() -> None:
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("guides/loadtest.md", "reference/http.md"))
    named = re.findall(r"\(\.\./(plots/[\w.-]+)\)", pages)
    assert len(named) >= 12
    assert {f"plots/{name}.png" for name, _, _ in page_pictures.PICTURES} <= set(named)
    for name in named:
        assert 1_000 < (DOCS / name).stat().st_size <= pictures.MOST_BYTES, name
    made = {f"plots/loadtest-{kept}.svg" for one in pictures.EXPERIMENTS for _, kept in one.plots}
    assert made <= set(named)


def test_every_experiment_is_a_file_of_the_examples() -> None:
    for experiment in pictures.EXPERIMENTS:
        assert (pictures.EXAMPLES / "loadtest" / experiment.file).is_file()


def test_without_a_browser_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoBrowserError, match="no browser: none of chromium, "):
        find_browser()


@pytest.mark.parametrize("dark", [False, True])
def test_a_saved_picture_keeps_the_colours_of_the_lines(tmp_path: Path, dark: bool) -> None:
    """Draw a dot of every colour beside shades of grey and blue, of which a page with texts and lines has most."""
    style = (
        (DOCS.parent / "clients/loraplex/gateway/page/colours.css").read_text(encoding="utf-8").split("@media")[dark]
    )
    found = re.findall(r"--(\w+): #(\w{6})", style)
    colours = {name: np.frombuffer(bytes.fromhex(value), np.uint8).astype(int) for name, value in found}
    fading = np.linspace(0, 1, 200)[:, None, None] * np.ones((1, 120, 1))
    paper = colours["paper"]
    shades = [colour + (paper - colour) * fading for colour in (colours["ink"], colours["c0"], colours["dim"])]
    drawn = np.concatenate(shades).astype(np.uint8)
    # Where streams are drawn, colours are light.
    light = {name: paper + (colour - paper) * 28 // 100 for name, colour in colours.items()}
    for number, (colour, lighter) in enumerate(zip(colours.values(), light.values(), strict=True)):
        drawn[590:594, 7 * number : 7 * number + 4] = colour
        drawn[595:599, 7 * number : 7 * number + 4] = lighter
    png = io.BytesIO()
    Image.fromarray(drawn).save(png, "PNG")
    save_picture(png.getvalue(), tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as saved:
        kept = np.asarray(saved.convert("RGB"), int)[580:].reshape(-1, 3)
    for name, colour in colours.items():
        assert colour.tolist() in kept.tolist(), name
        assert np.abs(kept - light[name]).max(axis=1).min() <= 12, name
