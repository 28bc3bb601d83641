"""Reading request bodies, and running blocking work in thread pools."""

import asyncio
import functools
import os
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import torch
from fastapi import Request
from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from torch import Tensor

from dosapp.errors import BusyError, InputError, TooLargeError
from dosapp.runtime.plural import plural
from dosapp.service.fair_queue import FairPool
from dosapp.service.http.limits import Pacer
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Caller
from dosapp.service.uploads import LARGE, CheckedImage, UploadDecoder

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Files = list[tuple[str, bytes]]  # names and contents
MANY = 32  # images of a request
MAX_FIELDS = 100  # of a form, beside its files
MAX_COMMAS = 64  # of a JSON body, beside two per image (one is that of a data: URL)
PIECE = 16_384  # bytes of a form that are parsed at once
SHORTEST_BOUNDARY = 8  # characters; browsers and libraries take more than 16
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class InMemoryParser(MultiPartParser):
    """Keeps uploads in memory, whatever their size: images are never written to a disk."""

    spool_max_size = 1 << 62


class ThreadPools:
    """Threads for blocking work, so that no kind of request waits for a slower kind.

    Decoding and reading is done for callers in turn. Large images are decoded apart, by threads
    that get what the others leave of a processor.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._decoders = FairPool(4, "decoder")
        self._batch_decoders = FairPool(1, "batch decoder")
        self._large_decoders = FairPool(max(1, (os.cpu_count() or 1) // 2), "large decoder", 10)
        self._session_decoders = FairPool(1, "session decoder", 10)
        self._readers = FairPool(2, "history reader", 5)
        self._operators = FairPool(1, "operator")
        self._waiters = FairPool(settings.max_pending, "waiter")
        self._pending = 0

    async def decode(self, caller: Caller, call: Callable[..., T], *args: Any) -> T:
        """Run the decoding of a few images."""
        return await _run(self._decoders, caller, call, *args)

    async def decode_images(
        self,
        caller: Caller,
        uploads: UploadDecoder,
        check_images: Callable[..., list[CheckedImage]],
        source: Any,
    ) -> Tensor:
        """Decode images of a request in parts of about a million pixels each.

        Args:
            caller: Of the request.
            uploads: Decodes checked images.
            check_images: Checks the sizes of the images.
            source: Its argument.

        Returns:
            `uint8 [n, 3, H, W]`.
        """
        # Requests of many images wait for each other, not those of few for them.
        small = self._decoders if len(source) <= MANY else self._batch_decoders
        parts: list[tuple[FairPool, list[CheckedImage]]] = []
        size = LARGE
        for image in await _run(small, caller, check_images, source):
            pool = self._large_decoders if image.pixels > LARGE else small
            if size + image.pixels > LARGE:
                parts.append((pool, []))
                size = 0
            parts[-1][1].append(image)
            size += image.pixels
        futures = [
            pool.submit(caller.name, functools.partial(uploads.decode_part, part))
            for pool, part in parts
        ]
        try:
            return torch.cat([await asyncio.wrap_future(future) for future in futures])
        finally:
            for future in futures:
                future.cancel()  # what is left after an error

    async def decode_session(self, caller: Caller, call: Callable[..., T], *args: Any) -> T:
        """Run the decoding of a session, one after the other: they may be large."""
        return await _run(self._session_decoders, caller, call, *args)

    async def read(self, caller: Caller, call: Callable[..., T], *args: Any) -> T:
        """Run a call that reads the folder."""
        return await _run(self._readers, caller, call, *args)

    async def operate(self, caller: Caller, call: Callable[..., T], *args: Any) -> T:
        """Run a call of an operator that waits for no other work."""
        return await _run(self._operators, caller, call, *args)

    async def wait(self, caller: Caller, call: Callable[..., T], *args: Any) -> T:
        """Run a call that may have to wait for the writer or for a disk.

        Raises:
            BusyError: Too many such calls wait already.
        """
        if self._pending >= self.settings.max_pending:
            raise BusyError(f"{self._pending} requests wait for the writer; try again later")
        self._pending += 1
        try:
            return await _run(self._waiters, caller, call, *args)
        finally:
            self._pending -= 1

    def close(self) -> None:
        """End the threads after their current work; work that has not begun is dropped."""
        for pool in vars(self).values():
            if isinstance(pool, FairPool):
                pool.close()


async def _run(pool: FairPool, caller: Caller, call: Callable[..., T], *args: Any) -> T:
    return await asyncio.wrap_future(pool.submit(caller.name, functools.partial(call, *args)))


def choose_request_id(headers: Headers) -> str:
    """Return the incoming X-Request-Id if it is valid, otherwise a new id."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def content_type(request: Request) -> str:
    """Return the content type without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, model: type[Body], max_items: int = 0) -> Body:
    """Read a JSON body; an empty body is an empty object.

    Args:
        request: The request.
        model: Of the body.
        max_items: How many items its list may have.

    Raises:
        InputError: The body does not fit the model.
        TooLargeError: It has too many values: an error for each of them would take seconds.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
    if body.count(b",") > MAX_COMMAS + 2 * max_items:
        most = plural(max_items, "image") if max_items else "a few"
        raise TooLargeError(f"the JSON body has too many values; at most {most} are accepted")
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise InputError(describe_first(error.errors())) from error


async def read_form(
    request: Request, settings: ServiceSettings, max_files: int
) -> tuple[dict[str, str], Files]:
    """Read the text fields and the files of a multipart form, all in memory.

    Raises:
        InputError: The form is malformed.
        TooLargeError: It has more than `max_files` files, or too many fields.
    """
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if boundary is not None and len(boundary) < SHORTEST_BOUNDARY:
        # It would be found everywhere, which takes long.
        name = boundary.decode("latin-1")
        raise InputError(f"the form's boundary is '{name}'; give at least 8 characters")
    parser = InMemoryParser(
        request.headers,
        _in_pieces(request),
        max_files=max_files,
        max_fields=MAX_FIELDS,
        max_part_size=settings.max_body,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        for kind, most in (("file", max_files), ("field", MAX_FIELDS)):
            if str(error).startswith(f"Too many {kind}s"):
                limit = f"{plural(most, kind)}, which is the limit"
                raise TooLargeError(f"the form has more than {limit}; send fewer") from error
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


async def _in_pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """Cut a body into pieces, between which other requests get their turn.

    A caller whose pieces take long to parse waits between them.
    """
    parsing: Pacer = request.app.state.limits.parsing
    async for chunk in request.stream():
        for start in range(0, max(1, len(chunk)), PIECE):
            start_time = time.thread_time()  # other threads may hold this one up
            yield chunk[start : start + PIECE]  # it is parsed until the next one is asked for
            milliseconds = 1000 * (time.thread_time() - start_time)
            await asyncio.sleep(parsing.delay(request.state.caller, count=milliseconds))


def describe_first(errors: Any) -> str:
    """Turn the first of pydantic's errors into a sentence."""
    first = errors[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    return f"{field}: {first['msg'].lower()}"
