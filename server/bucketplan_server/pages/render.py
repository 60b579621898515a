"""Templates to answers: escaping, the words for units, and the headers that every page carries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from bucketplan_core.errors import describe_ranks
from bucketplan_core.wire import WireValue, to_json
from bucketplan_server import __version__
from bucketplan_server.access.dependency import principal_of

__all__ = ["PAGE_HEADERS", "SHORT_HEX", "page", "readable_bytes", "static_answer"]

SHORT_HEX = 12
"""Digits of a digest that people read; the whole one is in the address and in the title."""

PAGE_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    # `same-origin`, not `no-referrer`: a browser that sends none says `Origin: null` with its own forms.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_FIGURE = re.compile(r"\b(?:([0-9]{4,18}) of )?([0-9]{4,18}) (ns|bytes)\b")
_STATIC_TYPES = {
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "style.css": "text/css; charset=utf-8",
}


def page(
    request: Request, template: str, *, code: int = 200, headers: Mapping[str, str] | None = None, **values: object
) -> HTMLResponse:
    """The answer that `template` makes of `values`; every value is escaped."""
    principal = principal_of(request)
    values |= {"path": request.url.path, "principal": principal, "is_operator": principal.has("operator", changes=True)}
    body = _environment().get_template(template).render(values)
    return HTMLResponse(body, status_code=code, headers={**PAGE_HEADERS, **(headers or {})})


def static_answer(request: Request, name: str) -> Response | None:
    """A file of the package's static folder, None where there is none of this name."""
    media_type = _STATIC_TYPES.get(name)
    if media_type is None:
        return None
    content, digest = _static(name)
    headers = {"Cache-Control": "no-cache", "ETag": f'"{digest}"', "X-Content-Type-Options": "nosniff"}
    if f'"{digest}"' in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


@cache
def _static(name: str) -> tuple[bytes, str]:
    content = resources.files("bucketplan_server.pages").joinpath("static", name).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:32]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bucketplan_server.pages"),
        # Every template is HTML, whatever its name.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=readable_bytes,
        duration=_duration,
        when=_when,
        iso=_iso,
        short=_short,
        ranks=_ranks,
        percent=_percent,
        figures=_figures,
        plain=_plain,
        query=_query,
        count=_count,
    )
    environment.globals.update(version=__version__)
    return environment


def readable_bytes(number: int) -> str:
    """Binary units with three digits: 1.50 MiB."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{number} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def _duration(ns: int) -> str:
    """The unit that leaves three digits: 4.20 ms."""
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000)):
        if abs(ns) >= size:
            value = ns / size
            return (
                f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
            )
    return f"{ns} ns"


def _figures(text: str) -> str:
    """A sentence of core, its whole nanoseconds and bytes in the units that people read."""

    def shown(found: re.Match[str]) -> str:
        unit = _duration if found[3] == "ns" else readable_bytes
        return (f"{unit(int(found[1]))} of " if found[1] else "") + unit(int(found[2]))

    return _FIGURE.sub(shown, text)


def _when(ns: int) -> str:
    return _moment(ns).strftime("%Y-%m-%d %H:%M:%S UTC")


def _iso(ns: int) -> str:
    return _moment(ns).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(ns: int) -> datetime:
    return datetime.fromtimestamp(ns // 1_000_000_000, tz=UTC)


def _short(digest: str) -> str:
    return digest[:SHORT_HEX]


def _ranks(ranks: Sequence[int]) -> str:
    return describe_ranks(ranks) if ranks else "none"


def _percent(ppm: int) -> str:
    """Parts in a million as per cent."""
    return f"{ppm / 10_000:.2f} %"


def _plain(value: WireValue) -> str:
    """A value of a document as people write it: text as it is, the rest as JSON."""
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value
    return to_json(value).decode()


def _query(values: Mapping[str, Any]) -> str:
    """A query string without what is empty."""
    return urlencode({name: value for name, value in values.items() if value not in ("", None)})


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}".replace(",", "\u202f")
