"""Reading request bodies, and running blocking work in thread pools."""

import asyncio
import functools
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from dosapp.errors import BusyError, InputError
from dosapp.service.settings import ServiceSettings

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Files = list[tuple[str, bytes]]  # names and contents
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class InMemoryParser(MultiPartParser):
    """Keeps uploads in memory, whatever their size: images are never written to a disk."""

    spool_max_size = 1 << 62


class ThreadPools:
    """Threads for blocking work, so that no kind of request waits for a slower kind."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._decoders = ThreadPoolExecutor(4, "decoder")
        self._session_decoders = ThreadPoolExecutor(1, "session decoder")
        self._waiters = ThreadPoolExecutor(settings.max_pending, "waiter")
        self._pending = 0

    async def decode(self, call: Callable[..., T], *args: Any) -> T:
        """Run the decoding of a few images."""
        return await self._run(self._decoders, call, *args)

    async def decode_session(self, call: Callable[..., T], *args: Any) -> T:
        """Run the decoding of a session, one after the other: they may be large."""
        return await self._run(self._session_decoders, call, *args)

    async def wait(self, call: Callable[..., T], *args: Any) -> T:
        """Run a call that may have to wait for the writer or for a disk.

        Raises:
            BusyError: Too many such calls wait already.
        """
        if self._pending >= self.settings.max_pending:
            raise BusyError(f"{self._pending} requests wait for the writer; try again later")
        self._pending += 1
        try:
            return await self._run(self._waiters, call, *args)
        finally:
            self._pending -= 1

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, functools.partial(call, *args))

    def close(self) -> None:
        """End the threads after their current work; work that has not begun is dropped."""
        for pool in (self._decoders, self._session_decoders, self._waiters):
            pool.shutdown(wait=False, cancel_futures=True)


def choose_request_id(headers: Headers) -> str:
    """Return the incoming X-Request-Id if it is valid, otherwise a new id."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def content_type(request: Request) -> str:
    """Return the content type without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, model: type[Body]) -> Body:
    """Read a JSON body; an empty body is an empty object.

    Raises:
        InputError: The body does not fit the model.
    """
    try:
        return model.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise InputError(describe_first(error.errors())) from error


async def read_form(request: Request, settings: ServiceSettings) -> tuple[dict[str, str], Files]:
    """Read the text fields and the files of a multipart form, all in memory.

    Raises:
        InputError: The form is malformed or has too many parts.
    """
    max_files = max(settings.max_images, settings.max_session_images)
    parser = InMemoryParser(
        request.headers, request.stream(), max_files=max_files, max_part_size=settings.max_body
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise InputError(f"the form cannot be read ({error})") from error
    fields: dict[str, str] = {}
    files: Files = []
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.append((value.filename or name, await value.read()))
            else:
                fields[name] = value
    finally:
        await form.close()
    return fields, files


def describe_first(errors: Any) -> str:
    """Turn the first of pydantic's errors into a sentence."""
    first = errors[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    return f"{field}: {first['msg'].lower()}"
