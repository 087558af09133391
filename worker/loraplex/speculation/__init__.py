"""Drafts of next tokens without weights: what followed the same tokens before, where measured times say that it pays.

    sequence's prompt and answer ──┐
    recent answers of its tenant   ├─▶ candidates ─▶ as long as tokens per second rise ─▶ rows of the next step
    with the same adapter          │   (suffixes.py)  (gain.py)
    ids that its format forces ────┘

A table of the places of each two ids finds candidates. A suffix automaton would find the longest match at once, but it
takes several Python objects an id and cannot forget the oldest; arctic-inference, which has one, keeps one tree for all
tenants and pins an older torch.
"""

from loraplex.speculation.drafter import SuffixDrafter as SuffixDrafter
