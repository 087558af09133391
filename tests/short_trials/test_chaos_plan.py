"""A plan is drawn from its seed alone, with every kind of fault and every option of a request."""

from __future__ import annotations

from loraplex_client.options import generate_request
from tests.trials.chaos.driver import options_of
from tests.trials.chaos.history import Pair, Revision
from tests.trials.chaos.oracle import truth
from tests.trials.chaos.plan import MODEL, Kind, make_plan, make_request

REVISIONS = (Revision("acme", "a", "sha256:a"), Revision("acme", "b", "sha256:b"))


def test_a_seed_plans_the_same_again_and_every_kind_of_fault_and_request() -> None:
    plan = make_plan(1000, 40, seed=3)
    assert make_plan(1000, 40, seed=3) == plan
    assert make_plan(1000, 40, seed=4) != plan
    assert all(plan.planned[kind] > 0 for kind in Kind)
    assert set(make_plan(100, len(Kind), seed=5).planned.values()) == {1}
    requests = [make_request(3, number, REVISIONS) for number in range(300)]
    assert requests == [make_request(3, number, REVISIONS) for number in range(300)]
    assert {request.n for request in requests} == {1, 2, 3}
    ends = {truth(MODEL, request, choice).reason for request in requests for choice in range(request.n)}
    assert ends == {"length", "end", "stop"}
    cut = [truth(MODEL, request, c) for request in requests if request.stop for c in range(request.n)]
    assert any(one.text and "".join(f"<{i}>" for i in one.token_ids) != one.text for one in cut)
    for request in requests:
        assert request.revision in REVISIONS
    texts = [request.texts for request in requests if request.texts]
    assert {one.task for one in texts} == {"embed", "classify"}
    assert {type(given) for one in texts for given in one.inputs} == {str, tuple, Pair}
    assert {len(request.documents) for request in requests} == {0, 1, 3, 20}
    for request in requests:
        assert 20 <= request.max_tokens <= 200 or not request.max_tokens


def test_every_option_that_is_served_is_drawn() -> None:
    """Compare the fields of the public messages with those of drawn requests: a new option must be drawn too."""
    specs = [
        generate_request(request.prompt, options_of(request)).spec  # type: ignore[arg-type]
        for request in (make_request(7, number, REVISIONS) for number in range(400))
        if not (request.continuations or request.texts or request.documents)
    ]
    for group in ("sampling", "stopping", "output", "prompt_options"):
        drawn = {field.name for spec in specs for field, _ in getattr(spec, group).ListFields()}
        assert drawn == {field.name for field in getattr(specs[0], group).DESCRIPTOR.fields}
    formats = specs[0].DESCRIPTOR.oneofs_by_name["format"].fields
    assert {field.name for field in formats} == {spec.WhichOneof("format") for spec in specs} - {None}
    assert any(spec.stopping.HasField("max_tokens") and spec.stopping.max_tokens == 0 for spec in specs)
    endings = [one for number in range(400) for one in make_request(7, number, REVISIONS).continuations]
    assert {type(ending) for ending in endings} == {str, tuple}
