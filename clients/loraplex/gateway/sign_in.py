"""Paths at which people sign in to the page, stay signed in, and sign out."""

from __future__ import annotations

import hmac
import html
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from loraplex.gateway.endpoint import HttpCall
from loraplex.gateway.errors import HttpError
from loraplex.gateway.provider import Providers, refused
from loraplex.gateway.sessions import Attempt, Session, is_own_page

_NOT_KEPT = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))
# Headers of the page that says why a sign-in was refused, and of redirects.
_PAGE_HEADERS = (
    *_NOT_KEPT,
    ("content-security-policy", "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("referrer-policy", "no-referrer"),
)


_NOT_SIGNED_IN = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Not signed in</title>
<h1>Not signed in</h1><p>WHY</p><p><a href="/">Back to the page</a></p></html>
"""


async def show_session(call: HttpCall) -> None:
    """Answer with the issuers at which people may sign in, and with the person who has."""
    if call.providers is None or call.cookies is None:
        await call.exchange.answer({"issuers": [], "person": None}, headers=_NOT_KEPT)
        return
    session = call.cookies.read(Session, call.exchange.headers) if is_own_page(call.exchange.headers) else None
    issuers = [
        {"issuer": issuer, "name": one.name or urlsplit(issuer).netloc}
        for issuer, one in call.providers.offered.items()
    ]
    await call.exchange.answer({"issuers": issuers, "person": session and _person(session)}, headers=_NOT_KEPT)


async def begin_sign_in(call: HttpCall) -> None:
    """Send a person to the provider of `issuer`, or of the only issuer. Raises HttpError."""
    providers, cookies = call.sign_in()
    issuer = _query(call).get("issuer") or (next(iter(providers.offered)) if len(providers.offered) == 1 else "")
    address, attempt = await providers.begin(issuer)
    await _redirect(call, 302, address, cookies.write(attempt))


async def end_sign_in(call: HttpCall) -> None:
    """Take the provider's answer: set the session and go to the page; or set nothing and say why in a sentence."""
    providers, cookies = call.sign_in()
    headers = cookies.clear(Attempt)  # an answer counts once
    try:
        written = cookies.write(await _finish(call, providers))
    except HttpError as error:
        page = _NOT_SIGNED_IN.replace("WHY", html.escape(error.message)).encode()
        await call.exchange.answer(page, error.status, [*headers, *_PAGE_HEADERS], "text/html; charset=utf-8")
        return
    await _redirect(call, 303, cookies.page, [*headers, *written])


async def _finish(call: HttpCall, providers: Providers) -> Session:
    answer = _query(call)
    attempt = call.sign_in()[1].read(Attempt, call.exchange.headers)
    if attempt is None or not hmac.compare_digest(attempt.state.encode(), answer.get("state", "").encode()):
        raise refused("this browser did not begin this sign-in, or it was used already; sign in again")
    return await providers.finish(attempt, answer)


async def renew_session(call: HttpCall) -> None:
    """Answer with the person whose session has a new token. Raises HttpError where the provider gives none."""
    providers, cookies = call.sign_in()
    session = _own_session(call)
    renewed = await providers.renew(session) if session else None
    if renewed is None:
        ended = {"error": {"code": "session_ended", "message": "your session has ended; sign in again"}}
        await call.exchange.answer(ended, 401, [*cookies.clear(Session), *_NOT_KEPT])
        return
    await call.exchange.answer({"person": _person(renewed)}, headers=[*cookies.write(renewed), *_NOT_KEPT])


async def end_session(call: HttpCall) -> None:
    """Sign a person out; answers with the address at which the provider does so too. Raises HttpError."""
    providers, cookies = call.sign_in()
    session = _own_session(call)
    to = await providers.end(session) if session else cookies.page
    await call.exchange.answer({"to": to}, headers=[*cookies.clear(Session), *_NOT_KEPT])


def _own_session(call: HttpCall) -> Session | None:
    """Return the session of a request that the page itself made. Raises HttpError for those of others."""
    if not is_own_page(call.exchange.headers):
        raise HttpError(403, "origin_not_allowed", "only the page of this gateway may ask for this")
    return call.sign_in()[1].read(Session, call.exchange.headers)


def _person(session: Session) -> Mapping[str, Any]:
    return {
        "name": session.name,
        "tenant": session.tenant,
        "roles": session.roles,
        "expires_in": max(0, round(session.ends_at - time.time())),
        "renewable": bool(session.refresh_token),
    }


def _query(call: HttpCall) -> Mapping[str, str]:
    """Return the parameters of the query. Raises HttpError on one that is given twice."""
    pairs = parse_qsl(call.exchange.query.decode("latin-1"), keep_blank_values=True)
    if len(pairs) != len(dict(pairs)):
        raise refused("the answer has a parameter twice")
    return dict(pairs)


async def _redirect(call: HttpCall, status: int, address: str, headers: list[tuple[str, str]]) -> None:
    await call.exchange.answer(b"", status, [("location", address), *headers, *_PAGE_HEADERS])
