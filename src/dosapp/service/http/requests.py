"""Where a request becomes a caller and a body: who asks, what was sent, and who carries it out."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from dosapp.errors import BusyError, InputError
from dosapp.service.http.limits import Limits
from dosapp.service.service import Service
from dosapp.service.tokens import LOCAL_CALLER, Caller, Role

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Files = list[tuple[str, bytes]]


class InMemoryParser(MultiPartParser):
    """Uploads stay in memory, whatever their size: pictures never touch a disk."""

    spool_max_size = 1 << 62


class RequestHandler:
    def __init__(self, service: Service) -> None:
        self.service, self.limits = service, Limits(service.settings)
        service.at_close.callback(self.limits.close)
        self._waiting = 0  # orders on their way

    def caller(self, role: Role) -> Callable[[Request], Caller]:
        """A dependency that lets only those through who may."""

        def found(request: Request) -> Caller:
            self.limits.check_rate(request.client.host if request.client else "")
            tokens = self.service.tokens
            if not tokens:
                if not self.limits.is_own_page(request):
                    raise HTTPException(
                        403, "without tokens only this machine may ask, and no other site's pages"
                    )
                return LOCAL_CALLER
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            who = tokens.caller(token.strip()) if scheme.lower() == "bearer" else None
            if who is None:
                more = {"WWW-Authenticate": "Bearer"}
                raise HTTPException(401, "give a token: Authorization: Bearer …", more)
            if not who.may(role):
                raise HTTPException(403, f"the token of '{who.name}' may not {role}")
            return who

        return found

    async def by_decoder(self, call: Callable[..., T], *args: Any) -> T:
        """In a thread: decoding for an answer must not hold up the others."""
        return await self._by(self.limits.decoders, call, *args)

    async def by_lesson_decoder(self, call: Callable[..., T], *args: Any) -> T:
        """The same for lessons, one after the other: they may be large."""
        return await self._by(self.limits.lesson_decoders, call, *args)

    async def by_waiter(self, call: Callable[..., T], *args: Any) -> T:
        """What may have to wait for the writer to finish a lesson, or for a disk."""
        if self._waiting >= self.service.settings.max_pending:
            raise BusyError(f"{self._waiting} orders wait for the writer already; try again later")
        self._waiting += 1
        try:
            return await self._by(self.limits.waiters, call, *args)
        finally:
            self._waiting -= 1

    async def _by(self, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, functools.partial(call, *args))

    async def form(self, request: Request) -> tuple[dict[str, str], Files]:
        """Text fields, and files with their names, all in memory."""
        s = self.service.settings
        most = max(s.max_images, s.max_session_images)
        parser = InMemoryParser(
            request.headers, request.stream(), max_files=most, max_part_size=s.max_body
        )
        try:
            data = await parser.parse()
        except (MultiPartException, KeyError, ValueError) as error:
            raise InputError(f"the form cannot be read ({error})") from error
        fields: dict[str, str] = {}
        files: Files = []
        try:
            for name, value in data.multi_items():
                if isinstance(value, UploadFile):
                    files.append((value.filename or name, await value.read()))
                else:
                    fields[name] = value
        finally:
            await data.close()
        return fields, files

    async def json(self, request: Request, kind: type[Body]) -> Body:
        try:
            return kind.model_validate_json(await request.body() or b"{}")
        except ValidationError as error:
            raise InputError(sentence(error.errors())) from error


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def sentence(errors: Any) -> str:
    """The first of pydantic's complaints."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    return f"{place}: {first['msg'].lower()}"
