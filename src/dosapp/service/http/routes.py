"""The routes of a service: read a request, call the service, answer."""

import asyncio
import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from dosapp.errors import InputError, TooLargeError
from dosapp.history.version import Version
from dosapp.service.http.auth import FreezeCaller, PredictCaller, RequireRole, TeachCaller
from dosapp.service.http.requests import ThreadPools, content_type, read_form, read_json
from dosapp.service.http.schemas import (
    AuditEntry,
    ChangeResponse,
    ClassesResponse,
    CorrectRequest,
    CorrectResponse,
    ErrorResponse,
    ForgetResponse,
    FreezeResponse,
    HealthResponse,
    JobResponse,
    LearnRequest,
    PredictionItem,
    PredictRequest,
    PredictResponse,
    ReadyResponse,
    RemoveRequest,
    RenameRequest,
    RollbackRequest,
    RollbackResponse,
    ScoredLabel,
    StatusResponse,
    VersionResponse,
    VersionSummary,
)
from dosapp.service.jobs import Job
from dosapp.service.service import PredictResult, Service

STATIC = Path(__file__).parent / "static"
SAMPLES = Path(__file__).parent / "samples"  # images of the demo's classes
DOCS_FILES = "/docs/files"
MAX_SCORES = 20_000  # of an answer
POLICY = "default-src 'none'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'; "
PAGE_POLICY = (
    POLICY + "form-action 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:"
)
PLAIN_TEXT: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}

router = APIRouter()


async def get_service(request: Request) -> Service:
    """Dependency: the service of the app."""
    service: Service = request.app.state.service
    return service


async def get_pools(request: Request) -> ThreadPools:
    """Dependency: the thread pools of the app."""
    pools: ThreadPools = request.app.state.pools
    return pools


ServiceDep = Annotated[Service, Depends(get_service)]
PoolsDep = Annotated[ThreadPools, Depends(get_pools)]


def describe_body(
    model: type[BaseModel], file_field: str = "", accepts_raw: bool = False
) -> dict[str, Any]:
    """Describe the body of a route that reads it itself, after the caller is known."""
    binary = {"type": "string", "format": "binary"}
    content: dict[str, Any] = {"application/json": {"schema": model.model_json_schema()}}
    if file_field:
        is_list = file_field == "images"
        files = {"type": "array", "items": binary, "minItems": 1} if is_list else binary
        form = {"type": "object", "required": [file_field], "properties": {file_field: files}}
        content["multipart/form-data"] = {"schema": form}
    if accepts_raw:
        content |= {kind: {"schema": binary} for kind in ("application/octet-stream", "image/*")}
    return {"requestBody": {"required": True, "content": content}}


# Predictions


@router.post(
    "/predict",
    response_model=PredictResponse,
    openapi_extra=describe_body(PredictRequest, "images", accepts_raw=True),
)
async def predict(
    request: Request,
    caller: PredictCaller,
    service: ServiceDep,
    pools: PoolsDep,
    top: Annotated[int, Query(ge=1, le=1000, description="classes per image")] = 5,
    learn: Annotated[bool, Query(description="whether the images join the stream")] = True,
    shape: Annotated[str, Query(description="of a raw tensor: n,3,H,W")] = "",
    dtype: Annotated[str, Query(description="of a raw tensor: uint8 or float32")] = "uint8",
) -> Response:
    """Labels, scores and the version that answered, for one or many images."""
    kind, uploads = content_type(request), service.uploads
    if kind == "multipart/form-data":
        _, files = await read_form(request, service.settings, service.settings.max_images)
        pixels = await pools.decode_images(caller, uploads, uploads.check_images, files)
    elif kind == "application/json":
        body = await read_json(request, PredictRequest, service.settings.max_images)
        pixels = await pools.decode_images(caller, uploads, uploads.check_base64, body.images)
    elif kind == "application/octet-stream":
        data = await request.body()
        pixels = await pools.decode(caller, uploads.decode_tensor, data, shape, dtype)
    elif kind.startswith("image/"):
        file = ("the image", await request.body())
        pixels = await pools.decode_images(caller, uploads, uploads.check_images, [file])
    else:
        raise HTTPException(
            415,
            f"content type '{kind[:40]}' is not supported; send multipart/form-data, "
            "application/json, application/octet-stream or image/…",
        )
    scores = len(pixels) * min(top, len(service.classes))
    if scores > max(MAX_SCORES, len(service.classes)):
        raise TooLargeError(
            f"{len(pixels)} images with {top} classes each are {scores:,} scores; at most "
            f"{MAX_SCORES:,} are sent, so send fewer images or a smaller top"
        )
    result = await asyncio.wrap_future(service.predict(pixels, top, learn, caller.name))
    answer = to_response(result).model_dump_json()  # FastAPI would check every value again
    return Response(answer, media_type="application/json")


def to_response(result: PredictResult) -> PredictResponse:
    """Convert a result of the service."""
    items = [
        PredictionItem(
            label=p.label,
            score=p.score,
            known=p.known,
            top=[ScoredLabel(label=label, score=score) for label, score in p.top],
        )
        for p in result.predictions
    ]
    return PredictResponse(version=result.version, predictions=items)


# Sessions and corrections


@router.post("/learn", status_code=202, openapi_extra=describe_body(LearnRequest, "archive"))
async def learn(
    request: Request,
    caller: TeachCaller,
    service: ServiceDep,
    pools: PoolsDep,
    lr: Annotated[float | None, Query(gt=0, le=1, description="of this session")] = None,
    epochs: Annotated[int | None, Query(ge=1, le=1000, description="of this session")] = None,
) -> JobResponse:
    """Start a session: a zip of class folders (`archive`), images of one class (`name`, `images`),
    a server-side folder, or only the corrections that wait. Answers with a job."""
    kind, uploads = content_type(request), service.uploads
    if kind == "multipart/form-data":
        most = service.settings.max_session_images
        fields, files = await read_form(request, service.settings, most)
        if "name" in fields:
            images = await pools.decode_session(caller, uploads.read_class, fields["name"], files)
        elif len(files) == 1:
            images = await pools.decode_session(caller, uploads.read_zip, files[0][1])
        else:
            raise InputError("send one zip of class folders, or images and a field 'name'")
    elif kind == "application/json":
        body = await read_json(request, LearnRequest)
        images = {}
        if body.folder is not None:
            images = await pools.decode_session(caller, uploads.read_folder, body.folder)
    else:
        raise HTTPException(415, "send multipart/form-data or application/json")
    job = await pools.decode_session(caller, service.learn, images, caller.name, lr, epochs)
    return to_job_response(job)


@router.get("/jobs")
async def jobs(caller: TeachCaller, service: ServiceDep) -> list[JobResponse]:
    """All sessions that are known, the oldest first."""
    return [to_job_response(job) for job in service.jobs()]


@router.get("/jobs/{job}")
async def job(job: str, caller: TeachCaller, service: ServiceDep) -> JobResponse:
    """How a session is doing."""
    return to_job_response(find_job(service, job))


@router.post("/jobs/{job}/cancel")
async def cancel(job: str, caller: TeachCaller, service: ServiceDep) -> JobResponse:
    """Cancel a session; it ends after its current step and changes nothing."""
    target = find_job(service, job)
    service.cancel(target, caller.name)
    return to_job_response(target)


def find_job(service: Service, name: str) -> Job:
    """Find a job by its id, or answer 404."""
    job = service.job(name)
    if job is None:
        raise HTTPException(404, f"there is no job '{name[:40]}'")
    return job


def to_job_response(job: Job) -> JobResponse:
    """Convert a job of the writer."""
    return JobResponse(**job.to_dict())


@router.post("/correct", openapi_extra=describe_body(CorrectRequest))
async def correct(
    request: Request, caller: TeachCaller, service: ServiceDep, pools: PoolsDep
) -> CorrectResponse:
    """Give the true class of an image. It joins the next session."""
    body = await read_json(request, CorrectRequest)
    uploads = service.uploads
    pixels = await pools.decode_images(caller, uploads, uploads.check_base64, [body.image])
    waiting = await pools.decode(
        caller, service.correct, pixels[0], body.label, caller.name, body.new_class
    )
    return CorrectResponse(waiting=waiting)


@router.post("/correct/forget")
async def forget(caller: TeachCaller, service: ServiceDep, pools: PoolsDep) -> ForgetResponse:
    """Drop the corrections that wait; answers how many there were."""
    return ForgetResponse(
        forgotten=await pools.decode(caller, service.forget_corrections, caller.name)
    )


# Classes


@router.get("/classes")
async def classes(caller: PredictCaller, service: ServiceDep) -> ClassesResponse:
    """All classes of the version that answers."""
    published = service.reader.published
    return ClassesResponse(version=published.number, classes=published.learner.classes)


@router.post("/classes/rename", openapi_extra=describe_body(RenameRequest))
async def rename(
    request: Request, caller: TeachCaller, service: ServiceDep, pools: PoolsDep
) -> ChangeResponse:
    """Rename a class, as a new version."""
    body = await read_json(request, RenameRequest)
    version = await pools.wait(caller, service.rename, body.name, body.to, caller.name)
    return ChangeResponse(version=version)


@router.post("/classes/remove", openapi_extra=describe_body(RemoveRequest))
async def remove(
    request: Request, caller: TeachCaller, service: ServiceDep, pools: PoolsDep
) -> ChangeResponse:
    """Remove a class, as a new version. Weights stay as they were trained."""
    body = await read_json(request, RemoveRequest)
    return ChangeResponse(version=await pools.wait(caller, service.remove, body.name, caller.name))


# Versions


@router.get("/versions")
async def versions(
    caller: PredictCaller,
    service: ServiceDep,
    pools: PoolsDep,
    last: Annotated[int, Query(ge=1, le=10_000)] = 100,
) -> list[VersionSummary]:
    """The last versions, the oldest first."""
    history = await pools.read(caller, service.history.versions)
    return [VersionSummary(**summarize(version)) for version in history[-last:]]


@router.get("/versions/{number}")
async def version(
    number: int, caller: PredictCaller, service: ServiceDep, pools: PoolsDep
) -> VersionResponse:
    """One version with its classes."""
    try:
        details = await pools.read(caller, service.history.version, number)
    except InputError as error:
        raise HTTPException(404, str(error)) from error
    names = list(details.facts["classes"])
    return VersionResponse(**summarize(details), classes=names, parent=details.parent)


def summarize(version: Version) -> dict[str, Any]:
    """Return what the list of versions shows of one."""
    names = ("number", "created", "reason", "checksum", "size")
    values = {name: getattr(version, name) for name in names}
    return {**values, "class_count": len(version.facts["classes"]), "seen": dict(version.seen)}


@router.post(
    "/rollback",
    openapi_extra=describe_body(RollbackRequest),
    response_model_exclude_defaults=True,
)
async def rollback(
    request: Request, caller: TeachCaller, service: ServiceDep, pools: PoolsDep
) -> RollbackResponse:
    """Restore a version as a new version: nothing is lost."""
    body = await read_json(request, RollbackRequest)
    version, note = await pools.wait(caller, service.rollback, body.version, caller.name)
    return RollbackResponse(version=version, note=note)


# Operation


@router.post("/freeze")
async def freeze(caller: FreezeCaller, service: ServiceDep, pools: PoolsDep) -> FreezeResponse:
    """Stop learning from the stream at once; `trouble` tells if a restart would not know."""
    return FreezeResponse(
        frozen=True, trouble=await pools.operate(caller, service.freeze, caller.name)
    )


@router.post("/unfreeze")
async def unfreeze(caller: FreezeCaller, service: ServiceDep, pools: PoolsDep) -> FreezeResponse:
    """Learn from the stream again."""
    return FreezeResponse(
        frozen=False, trouble=await pools.operate(caller, service.unfreeze, caller.name)
    )


@router.get("/audit", response_model=list[AuditEntry], response_model_exclude_unset=True)
async def audit(caller: TeachCaller, service: ServiceDep, pools: PoolsDep) -> list[dict[str, Any]]:
    """The last changes, and who made them."""
    return await pools.read(caller, service.audit.last)


@router.get("/status", response_model=StatusResponse, response_model_exclude_unset=True)
async def status(caller: PredictCaller, service: ServiceDep) -> dict[str, Any]:
    """The live state: everything the web page shows."""
    return service.status()


@router.get("/health")
async def health() -> HealthResponse:
    """Whether the process answers."""
    return HealthResponse(ok=True)


@router.get("/ready", responses={503: {"model": ErrorResponse}})
async def ready(service: ServiceDep) -> ReadyResponse:
    """Whether reader and writer run; 503 if not."""
    if not service.is_ready:
        raise HTTPException(503, "the reader or the writer has ended; restart the service")
    return ReadyResponse(ready=True, version=service.version)


@router.get("/metrics", response_class=Response, responses={200: PLAIN_TEXT})
async def metrics(request: Request, caller: PredictCaller, service: ServiceDep) -> Response:
    """Prometheus' text format."""
    return PlainTextResponse(request.app.state.metrics.to_text(service.status()))


# The web page


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The web page."""
    return static_response(request, "index.html", "text/html")


@router.get("/app.css", include_in_schema=False)
async def stylesheet(request: Request) -> Response:
    """The style of the web page."""
    return static_response(request, "app.css", "text/css")


@router.get("/app.js", include_in_schema=False)
async def script(request: Request) -> Response:
    """The script of the web page."""
    return static_response(request, "app.js", "text/javascript")


@router.get("/samples/{name}", include_in_schema=False)
async def sample(request: Request, name: str) -> Response:
    """An image of one of the demo's classes."""
    if name not in {file.name for file in SAMPLES.iterdir()}:
        raise HTTPException(404, "no such sample")
    return static_response(request, name, "image/png", SAMPLES)


def static_response(
    request: Request, name: str, media_type: str, folder: Path = STATIC
) -> Response:
    """Answer with a file; 304 if the browser already has it. It checks with every request."""
    content, etag = _read_static(folder / name)
    headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache", "ETag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)


@functools.cache
def _read_static(path: Path) -> tuple[bytes, str]:
    content = path.read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The interface, by Swagger UI. Its one inline script is allowed by its hash."""
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="DoSAPP: interface",
        swagger_js_url=f"{DOCS_FILES}/swagger-ui-bundle.js",
        swagger_css_url=f"{DOCS_FILES}/swagger-ui.css",
        swagger_favicon_url=f"{DOCS_FILES}/favicon.png",
    )
    (script,) = re.findall(rb"<script>(.*?)</script>", bytes(page.body), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    page.headers["Content-Security-Policy"] = (
        f"{POLICY}form-action 'self'; script-src 'self' 'sha256-{digest}'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    )
    return page


def describe_roles() -> None:
    """Write the role that each route needs into its description: none, predict or teach."""
    for route in router.routes:
        if isinstance(route, APIRoute):
            calls = [dependency.call for dependency in route.dependant.dependencies]
            roles = [call.role for call in calls if isinstance(call, RequireRole)]
            extra = route.openapi_extra or {}
            route.openapi_extra = {**extra, "x-role": roles[0] if roles else "none"}


describe_roles()
