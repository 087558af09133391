"""The answers that `make evaluate` takes for the same, and the versions that it and the pages name."""

from __future__ import annotations

from tests.trials.evaluate import harness, testers
from tests.trials.libraries.library import ROOT


def test_a_text_a_log_probability_or_its_rank_may_differ() -> None:
    truth = ["team: billing", "-120.34271", [["-3.59730", "False"], ["-0.00001", "True"]]]
    assert harness.different(truth, ["team: billing", "-120.34288", [["-3.59732", "False"], ["-0.00004", "True"]]]) == 0
    assert harness.different(truth, ["team: Billing", "-120.34871", [["-3.59730", "True"], ["-0.00001", "True"]]]) == 3
    assert harness.different(truth[2:], [[["-3.59730", "False"]]]) == 1


def test_versions_are_those_of_the_constraints_and_of_the_pages() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    for package in (*harness.PACKAGES[1:], *testers.GUIDELLM[1:], *testers.LOCUST[1:]):
        assert package in constraints
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("guides/loadtest.md", "reference/http.md"))
    for packages in (harness.PACKAGES, testers.GUIDELLM, testers.LOCUST):
        assert packages[0] in pages
