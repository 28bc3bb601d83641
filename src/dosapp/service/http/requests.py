"""Reading request bodies, and running blocking work in thread pools."""

import asyncio
import functools
import os
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

import torch
from fastapi import Request
from PIL import Image
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from torch import Tensor

from dosapp.errors import BusyError, InputError
from dosapp.service.fair_queue import FairPool
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Caller
from dosapp.service.uploads import LARGE, UploadDecoder, count_pixels

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Files = list[tuple[str, bytes]]  # names and contents
MANY = 32  # images of a request
PIECE = 16_384  # bytes of a form that are parsed at once
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
        open_images: Callable[..., list[tuple[str, Image.Image]]],
        source: Any,
    ) -> Tensor:
        """Decode images of a request in parts of a few million pixels each.

        Args:
            caller: Of the request.
            uploads: Decodes opened images.
            open_images: Opens the images and checks their sizes.
            source: Its argument.

        Returns:
            `uint8 [n, 3, H, W]`.
        """
        pool = self._decoders if len(source) <= MANY else self._batch_decoders
        opened = await _run(pool, caller, open_images, source)
        parts: list[tuple[FairPool, list[tuple[str, Image.Image]]]] = []
        # Requests of many images wait for each other, not those of few for them.
        small = self._decoders if len(opened) <= MANY else self._batch_decoders
        size = LARGE
        for name, image in opened:
            pixels = count_pixels(image)
            pool = self._large_decoders if pixels > LARGE else small
            if size + pixels > LARGE:
                parts.append((pool, []))
                size = 0
            parts[-1][1].append((name, image))
            size += pixels
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


async def read_json(request: Request, model: type[Body]) -> Body:
    """Read a JSON body; an empty body is an empty object.

    Raises:
        InputError: The body does not fit the model.
    """
    try:
        body = bytearray()
        async for part in request.stream():
            body += part
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise InputError(describe_first(error.errors())) from error


async def read_form(request: Request, settings: ServiceSettings) -> tuple[dict[str, str], Files]:
    """Read the text fields and the files of a multipart form, all in memory.

    Raises:
        InputError: The form is malformed or has too many parts.
    """
    max_files = max(settings.max_images, settings.max_session_images)
    parser = InMemoryParser(
        request.headers,
        _in_pieces(request.stream()),
        max_files=max_files,
        max_part_size=settings.max_body,
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


async def _in_pieces(stream: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Cut a stream into pieces, between which other requests get their turn."""
    async for chunk in stream:
        for start in range(0, max(1, len(chunk)), PIECE):
            yield chunk[start : start + PIECE]
            await asyncio.sleep(0)


def describe_first(errors: Any) -> str:
    """Turn the first of pydantic's errors into a sentence."""
    first = errors[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    return f"{field}: {first['msg'].lower()}"
