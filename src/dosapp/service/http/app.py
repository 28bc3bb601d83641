"""The service over HTTP: parsing and answering only."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from starlette.exceptions import HTTPException as AnyHTTPException

from dosapp.errors import BusyError, InputError, ReadOnlyError, TooLargeError
from dosapp.service.http.requests import RequestHandler, content_type, sentence
from dosapp.service.http.schemas import (
    CorrectRequest,
    ErrorResponse,
    LearnRequest,
    PredictionItem,
    PredictRequest,
    PredictResponse,
    RemoveRequest,
    RenameRequest,
    RollbackRequest,
    ScoredLabel,
)
from dosapp.service.reader import Answer
from dosapp.service.service import Service
from dosapp.service.tokens import Caller

PAGE = Path(__file__).parent / "static" / "index.html"
T = TypeVar("T")


ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 403, 404, 409, 413, 415, 422, 429)
}


def build_app(service: Service) -> FastAPI:
    handler = RequestHandler(service)

    app = FastAPIOffline(  # the scripts of /docs come from here, too
        static_url="/docs/files",
        redoc_url=None,
        title="DoSAPP",
        version=version_of("dosapp"),
        description="A CLIP classifier that learns new classes and keeps the old ones.",
        responses=ERRORS,
    )
    app.add_middleware(handler.limits.middleware)

    # Mistakes become one sentence

    def said(code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(request: Request, error: Exception) -> Response:
            more = {"Retry-After": "1"} if code == 429 else None
            return JSONResponse({"error": str(error)}, code, more)

        return answer

    for kind, code in (
        (InputError, 400),
        (TooLargeError, 413),
        (BusyError, 429),
        (ReadOnlyError, 409),
    ):
        app.add_exception_handler(kind, said(code))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse({"error": sentence(error.errors())}, 422)

    @app.exception_handler(AnyHTTPException)
    async def refused(request: Request, error: AnyHTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    _asking(app, handler)
    _teaching(app, handler)
    _keeping(app, handler)
    return app


def _asking(app: FastAPI, handler: RequestHandler) -> None:
    service = handler.service
    Asks = Annotated[Caller, Depends(handler.caller("predict"))]

    @app.post("/predict", openapi_extra=_bodies(PredictRequest, "images", tensor=True))
    async def predict(
        request: Request,
        who: Asks,
        top: Annotated[int, Query(ge=1, le=1000, description="classes per picture")] = 5,
        learn: Annotated[bool, Query(description="whether the pictures join the stream")] = True,
        shape: Annotated[str, Query(description="of a raw tensor: n,3,H,W")] = "",
        dtype: Annotated[str, Query(description="of a raw tensor: uint8 or float32")] = "uint8",
    ) -> PredictResponse:
        """Labels, scores and the version that answered, for one or many pictures."""
        kind = content_type(request)
        uploads = service.uploads
        if kind == "multipart/form-data":
            _, files = await handler.form(request)
            pixels = await handler.by_decoder(uploads.pictures, files)
        elif kind == "application/json":
            body = await handler.json(request, PredictRequest)
            pixels = await handler.by_decoder(uploads.encoded, body.images)
        elif kind == "application/octet-stream":
            pixels = await handler.by_decoder(uploads.tensor, await request.body(), shape, dtype)
        elif kind.startswith("image/"):
            pixels = await handler.by_decoder(
                uploads.pictures, [("the picture", await request.body())]
            )
        else:
            raise HTTPException(
                415,
                f"content type '{kind[:40]}' is not read; send multipart/form-data, "
                "application/json, application/octet-stream or image/…",
            )
        answer: Answer = await asyncio.wrap_future(service.ask(pixels, top))
        service.answered_with(pixels, answer, learn)
        return PredictResponse(
            version=answer.version,
            predictions=[
                PredictionItem(
                    label=p.label if p.score >= service.settings.unknown_threshold else "unknown",
                    score=p.score,
                    known=p.score >= service.settings.unknown_threshold,
                    top=[ScoredLabel(label=label, score=score) for label, score in p.top],
                )
                for p in answer.predictions
            ],
        )


def _teaching(app: FastAPI, handler: RequestHandler) -> None:
    service = handler.service
    Teaches = Annotated[Caller, Depends(handler.caller("teach"))]

    @app.post("/learn", status_code=202, openapi_extra=_bodies(LearnRequest, "archive"))
    async def learn(request: Request, who: Teaches) -> dict[str, Any]:
        """A lesson: a zip of class folders (`archive`), pictures of one class (`name`, `images`), a
        server-side folder, or only the corrections that wait. Answers with a job."""
        kind, uploads = content_type(request), service.uploads
        if kind == "multipart/form-data":
            fields, files = await handler.form(request)
            if "name" in fields:
                pictures = await handler.by_lesson_decoder(uploads.lesson, fields["name"], files)
            elif len(files) == 1:
                pictures = await handler.by_lesson_decoder(uploads.archive, files[0][1])
            else:
                raise InputError("send one zip of class folders, or pictures and a field 'name'")
        elif kind == "application/json":
            body = await handler.json(request, LearnRequest)
            pictures = {}
            if body.folder is not None:
                pictures = await handler.by_lesson_decoder(uploads.folder, body.folder)
        else:
            raise HTTPException(415, "send multipart/form-data or application/json")
        job = await handler.by_lesson_decoder(service.teach, pictures, who.name)
        return job.facts()

    @app.get("/jobs")
    async def jobs(who: Teaches) -> list[dict[str, Any]]:
        return [job.facts() for job in service.jobs()]

    @app.get("/jobs/{job}")
    async def job(job: str, who: Teaches) -> dict[str, Any]:
        return _there(service.job(job), f"job '{job[:40]}'").facts()

    @app.post("/jobs/{job}/cancel")
    async def cancel(job: str, who: Teaches) -> dict[str, Any]:
        """Give a lesson up; it ends after its current step, and nothing has changed."""
        found = _there(service.job(job), f"job '{job[:40]}'")
        service.cancel(found, who.name)
        return found.facts()

    @app.post("/correct", openapi_extra=_bodies(CorrectRequest))
    async def correct(request: Request, who: Teaches) -> dict[str, Any]:
        """What a picture really was. It joins the next session."""
        body = await handler.json(request, CorrectRequest)
        pixels = await handler.by_decoder(service.uploads.encoded, [body.image])
        waiting = await handler.by_decoder(service.correct, pixels[0], body.label, who.name)
        return {"waiting": waiting}

    @app.post("/correct/forget")
    async def forget(who: Teaches) -> dict[str, Any]:
        """The corrections that wait were wrong themselves. Says how many there were."""
        return {"forgotten": await handler.by_decoder(service.forget_corrections, who.name)}

    @app.post("/classes/rename", openapi_extra=_bodies(RenameRequest))
    async def rename(request: Request, who: Teaches) -> dict[str, Any]:
        body = await handler.json(request, RenameRequest)
        return {"version": await handler.by_waiter(service.rename, body.name, body.to, who.name)}

    @app.post("/classes/remove", openapi_extra=_bodies(RemoveRequest))
    async def remove(request: Request, who: Teaches) -> dict[str, Any]:
        body = await handler.json(request, RemoveRequest)
        return {"version": await handler.by_waiter(service.remove, body.name, who.name)}


def _keeping(app: FastAPI, handler: RequestHandler) -> None:
    service, limits = handler.service, handler.limits
    Asks = Annotated[Caller, Depends(handler.caller("predict"))]
    Teaches = Annotated[Caller, Depends(handler.caller("teach"))]

    @app.get("/classes")
    async def classes(who: Asks) -> dict[str, Any]:
        published = service.reader.published
        return {"version": published.number, "classes": published.learner.classes}

    # Versions

    @app.get("/versions")
    async def versions(
        who: Asks, last: Annotated[int, Query(ge=1, le=10_000)] = 100
    ) -> list[dict[str, Any]]:
        found = await handler.by_waiter(service.history.versions)
        return [_brief(version) for version in found[-last:]]

    @app.get("/versions/{number}")
    async def version(number: int, who: Asks) -> dict[str, Any]:
        try:
            found = await handler.by_waiter(service.history.version, number)
        except InputError as error:
            raise HTTPException(404, str(error)) from error
        return _brief(found) | {"classes": list(found.facts["classes"]), "parent": found.parent}

    @app.post("/rollback", openapi_extra=_bodies(RollbackRequest))
    async def rollback(request: Request, who: Teaches) -> dict[str, Any]:
        """What a version was, as a new version: nothing is lost."""
        body = await handler.json(request, RollbackRequest)
        return {"version": await handler.by_waiter(service.rollback, body.version, who.name)}

    @app.post("/freeze")
    async def freeze(who: Teaches) -> dict[str, Any]:
        """Stop learning from the stream, at once; `trouble` says if a restart would not know."""
        return {"frozen": True, "trouble": await handler.by_waiter(service.freeze, who.name)}

    @app.post("/unfreeze")
    async def unfreeze(who: Teaches) -> dict[str, Any]:
        return {"frozen": False, "trouble": await handler.by_waiter(service.unfreeze, who.name)}

    @app.get("/audit")
    async def audit(who: Teaches) -> list[dict[str, Any]]:
        return await handler.by_waiter(service.audit.last)

    # How it is

    @app.get("/status")
    async def status(who: Asks) -> dict[str, Any]:
        """Everything the page shows live."""
        return service.status()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"ok": True}

    @app.get("/ready", responses={503: {"model": ErrorResponse}})
    async def ready() -> Response:
        if service.ready:
            return JSONResponse({"ready": True, "version": service.version})
        return JSONResponse({"error": "reader or writer is not at work"}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(who: Asks) -> Response:
        return PlainTextResponse(limits.exposition(service.status()))

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(), headers=SAFE)


SAFE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _there(found: T | None, what: str) -> T:
    if found is None:
        raise HTTPException(404, f"there is no {what}")
    return found


def _brief(version: Any) -> dict[str, Any]:
    names = ("number", "created", "reason", "checksum", "size")
    return {name: getattr(version, name) for name in names} | {
        "class_count": len(version.facts["classes"]),
        "seen": dict(version.seen),
    }


def _bodies(model: type[BaseModel], field: str = "", tensor: bool = False) -> dict[str, Any]:
    """What routes that read their bodies themselves, once they know who asks, say about them."""
    binary = {"type": "string", "format": "binary"}
    many = {"type": "array", "items": binary, "minItems": 1} if field == "images" else binary
    kinds: dict[str, Any] = {"application/json": {"schema": model.model_json_schema()}}
    if field:
        form = {"type": "object", "required": [field], "properties": {field: many}}
        kinds["multipart/form-data"] = {"schema": form}
    if tensor:
        kinds |= {kind: {"schema": binary} for kind in ("application/octet-stream", "image/*")}
    return {"requestBody": {"required": True, "content": kinds}}
