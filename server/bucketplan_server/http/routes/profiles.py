"""Measured hardware profiles by name: what `bucketplan calibrate` measured, for leaders that name it when they open."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.errors import BucketplanError, DecodeError
from bucketplan_core.presets import MeasuredProfile
from bucketplan_core.wire import WireValue
from bucketplan_server.access import Caller, needs
from bucketplan_server.http.answers import answer, wanted_encoding
from bucketplan_server.http.bodies import read_document
from bucketplan_server.http.describe import DIGEST, MAP, body_of, both, obj, problems
from bucketplan_server.http.negotiation import body_encoding
from bucketplan_server.http.state import State, cause_of
from bucketplan_server.problems import Problem, refuse
from bucketplan_server.store.engine import StoreError
from bucketplan_server.store.hardware import StoredProfile, list_profiles, load_profile, store_profile

__all__ = ["router"]

router = APIRouter()
_STORED = obj({"digest": DIGEST, "name": {"type": "string"}, "version": {"type": "integer"}})
Name = Annotated[str, Path(pattern="^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$", description="name of the profile")]


@router.get(
    "/v1/profiles",
    dependencies=[needs("auditor")],
    summary="Measured hardware profiles, the newest version of each name",
    responses={
        200: both(obj({"profiles": {"type": "array", "items": MAP}}), "sorted by name, without the figures"),
        **problems("invalid-parameter", "not-acceptable", "store-unavailable"),
    },
)
async def get_profiles(request: Request, state: State) -> Response:
    encoding = wanted_encoding(request)
    try:
        found = await list_profiles(state.store)
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    return answer({"profiles": [_about(profile) for profile in found]}, encoding)


@router.get(
    "/v1/profiles/{name}",
    dependencies=[needs("rank")],
    summary="A measured hardware profile with its figures and the history of its name",
    responses={
        200: both(
            obj({"digest": DIGEST, "profile": MAP, "version": {"type": "integer"}}),
            "`digest` is that of the canonical encoding of `profile`; `versions` lists all of the name",
        ),
        **problems("invalid-parameter", "not-acceptable", "unknown-profile", "store-unavailable"),
    },
)
async def get_profile(
    request: Request,
    state: State,
    name: Name,
    version: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="the newest where left out")] = None,
) -> Response:
    encoding = wanted_encoding(request)
    try:
        found = await load_profile(state.store, name, version)
        versions = await list_profiles(state.store, name=name)
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    if found is None:
        which = f"no version {version} of profile {name!r}" if versions else f"no profile {name!r}"
        raise Problem(
            "unknown-profile", f"{which} is stored; PUT /v1/profiles/{name} stores one", fields={"name": name}
        )
    tag = f'"{found.digest}"' if encoding == "msgpack" else f'W/"{found.digest}"'
    tree = {**_about(found), "profile": found.profile.to_wire(), "versions": [_about(each) for each in versions]}
    return answer(tree, encoding, headers={"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept"})


@router.put(
    "/v1/profiles/{name}",
    dependencies=[needs("operator")],
    summary="Store what was measured as the next version of a profile; the same content again changes nothing",
    openapi_extra=body_of(
        obj({"profile": {**MAP, "description": "as `bucketplan calibrate` writes it"}, "reason": {"type": "string"}}),
        "epochs that are open keep the figures they have",
    ),
    responses={
        200: both(_STORED, "the newest version is this one already"),
        201: both(_STORED, "a new version"),
        **problems(
            "invalid-body",
            "invalid-parameter",
            "not-acceptable",
            "body-timeout",
            "body-too-large",
            "busy",
            "unsupported-media-type",
            "schema-version",
            "store-unavailable",
        ),
    },
)
async def put_profile(request: Request, state: State, caller: Caller, name: Name) -> Response:
    encoding = wanted_encoding(request, default=body_encoding(request.headers.get("content-type")))
    fields = await read_document(request)
    try:
        cause = cause_of(request, fields.plain_text("reason", lines=True))
        profile = MeasuredProfile.from_wire(fields.raw("profile"), "body.profile")
        fields.finish()
        caller.everything("the attempts of every namespace take the figures of a profile")
        if profile.name != name:
            raise DecodeError("body.profile.name", profile.name, f"must be {name!r}, as in the address")
    except BucketplanError as error:
        raise refuse(error).problem() from None
    try:
        stored, new = await store_profile(state.store, profile, cause)
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    return answer(_about(stored), encoding, status=201 if new else 200)


def _about(found: StoredProfile) -> dict[str, WireValue]:
    return {
        "actor": found.actor,
        "backend": found.profile.backend,
        "created_ns": found.created_ns,
        "device": found.profile.device,
        "digest": found.digest,
        "name": found.name,
        "nodes": found.profile.shape.nodes,
        "reason": found.reason,
        "size": found.profile.shape.size,
        "version": found.version,
    }
