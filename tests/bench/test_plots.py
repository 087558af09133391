"""Plots: the same figures give the same bytes, so that a run that changes nothing changes no file."""

from __future__ import annotations

from pathlib import Path

from bench.plots import Panel, draw


def test_a_plot_follows_from_its_figures_alone(tmp_path: Path) -> None:
    panels = [
        Panel(f"panel {number}", "rows", "us", {"ours": [(1, 3.0), (2, 4.0)], "theirs": [(1, 5.0), (2, 9.0)]})
        for number in range(2)
    ]
    (tmp_path / "again").mkdir()
    paths = [tmp_path / "plot.svg", tmp_path / "again" / "plot.svg"]
    for path in paths:
        draw(panels, path)
    one, other = (path.read_bytes() for path in paths)
    assert one == other
    for text in (b"panel 1", b"theirs", b"<svg"):
        assert text in one
    draw(panels[:1], paths[0])
    assert paths[0].read_bytes() != other
