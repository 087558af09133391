"""Grammars in EBNF, as the engine protocol has them, in the syntax of llguidance."""

from __future__ import annotations

from functools import partial

from router.text.prompt_encoder import PromptEncoder
from rpc.errors import InvalidField

_FIELD = "sampling_params.ebnf_grammar"
# Maximum bytes of a grammar: llguidance's converter takes 0.2 s for 500 rules, and four times as long for 1,000.
EBNF_BYTES = 8 * 1024
# Maximum length of a grammar that is converted on the event loop, in 5 milliseconds.
_SHORT_CHARACTERS = 1_024


async def read_ebnf(ebnf: str, tenant: str, encoder: PromptEncoder) -> str:
    """Return a grammar in llguidance's syntax; a large one is converted in a thread, at the tenant's turn.

    Raises InvalidField.
    """
    return await encoder.in_turn(tenant, partial(lark_of, ebnf)) if len(ebnf) > _SHORT_CHARACTERS else lark_of(ebnf)


def lark_of(ebnf: str) -> str:
    """Return a grammar in llguidance's syntax. Raises InvalidField."""
    # Imported for such a request alone.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if (size := len(ebnf.encode())) > EBNF_BYTES:
        raise InvalidField(_FIELD, f"{size} bytes; at most {EBNF_BYTES}", reason="INVALID_FORMAT")
    try:
        return str(gbnf_to_lark(ebnf)).removeprefix("%llguidance {}\n")
    except Exception as error:  # it raises what its own code happens to
        message = f"not a grammar in EBNF: {str(error) or type(error).__name__}"
        raise InvalidField(_FIELD, message, reason="INVALID_FORMAT") from error
