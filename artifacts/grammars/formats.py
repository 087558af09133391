"""Formats of a JSON schema as patterns of our own: llguidance's accept some texts that are none (February 30).

Each accepts only texts of its format, and all that are in common use. Left out are: the year 0000, leap seconds that
are not 23:59:60 UTC, quoted local parts of addresses, hostnames that may be encoded Unicode, IPv6 addresses that end
as IPv4, URIs with an IP address in brackets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_FRACTION = r"(?:\.[0-9]{1,9})?"
_TIME = (
    f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    f"|23:59:60{_FRACTION}(?:[Zz]|[+-]00:00))"
)
_N = "[0-9]{1,9}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = f"P(?:{_N}W|{_CLOCK}|(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_CLOCK})?)"
_ALNUM, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
# A label of at most 63 characters, without hyphens at both its third and fourth place.
_LABEL = (
    f"{_ALNUM}(?:{_ALNUM}|{_INNER}{_ALNUM}|{_INNER}{{2}}{_ALNUM}"
    f"|{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,58}}{_ALNUM})?"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = (
    f"(?:(?:{_H}:){{7}}{_H}|(?:{_H}:){{1,7}}:|"
    + "|".join(f"(?:{_H}:){{1,{7 - after}}}(?::{_H}){{1,{after}}}" for after in range(1, 7))
    + f"|:(?:(?::{_H}){{1,7}}|:))"
)
_HEX = "[0-9A-Fa-f]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_ESCAPED = f"%{_HEX}{{2}}"
_SEGMENT = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|{_ESCAPED})"
_USER = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:]|{_ESCAPED})*"
_NAME = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|{_ESCAPED})*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:\/\/(?:{_USER}@)?{_NAME}(?::[0-9]{{0,5}})?(?:\/{_SEGMENT}*)*"
    rf"|\/(?:{_SEGMENT}+(?:\/{_SEGMENT}*)*)?|{_SEGMENT}+(?:\/{_SEGMENT}*)*)?"
    rf"(?:\?(?:{_SEGMENT}|[\/?])*)?(?:#(?:{_SEGMENT}|[\/?])*)?"
)


def _whole(pattern: str) -> dict[str, Any]:
    return {"pattern": f"^(?:{pattern})$"}


# The schema of a format's texts, by its name.
FORMATS: Mapping[str, dict[str, Any]] = {
    "date-time": _whole(f"{_DATE}[Tt]{_TIME}"),
    "date": _whole(_DATE),
    "time": _whole(_TIME),
    "duration": _whole(_DURATION),
    "email": _whole(_EMAIL),
    "hostname": {**_whole(_HOSTNAME), "maxLength": 253},
    "ipv4": _whole(_IPV4),
    "ipv6": _whole(_IPV6),
    "uuid": _whole(_UUID),
    "uri": _whole(_URI),
}
