"""Pictures of the gateway's page, with a prompt answered and the cluster's state below it."""

from __future__ import annotations

from pathlib import Path

from bench.devtools import Page, browser_page

# Names, widths in pixels, and whether dark.
PICTURES = (("page", 1280, False), ("page-dark", 1280, True), ("page-narrow", 400, True))
# Maximum height in pixels of a picture.
_HEIGHT = 2400
_TENANT, _PROMPT = "acme", "Return a list of"
# Number of values of a line that a picture shows at least.
_VALUES = 8


async def draw_page(browser: str, address: str, directory: Path) -> None:
    """Draw the page of the gateway at an address, while its cluster serves a load. Raises NoBrowserError."""
    async with browser_page(browser) as page:
        await page.open(f"http://{address}/cluster")
        await _ask(page)
        line = "document.querySelector('#cards polyline')?.getAttribute('points').split(' ').length"
        await page.wait_for(f"{line} >= {_VALUES}")
        for name, width, dark in PICTURES:
            await page.save(directory / f"{name}.png", width=width, dark=dark, most=_HEIGHT)


async def _ask(page: Page) -> None:
    """Send a prompt to an adapter and to the base model, and wait for both answers."""
    await page.type("#tenant", _TENANT)
    await page.press("Tab")
    await page.wait_for("document.getElementById('models').options.length > 1")
    await page.evaluate("document.getElementById('kind').value = 'completion'")
    await page.type("#tokens", "60")
    await page.type("#prompt", _PROMPT)
    await page.press("Enter", control=True)
    facts = [f"document.getElementById('facts-{side}').textContent.includes('ended')" for side in ("a", "b")]
    await page.wait_for(" && ".join(facts))
    await page.evaluate("document.getElementById('prompt').blur()")
