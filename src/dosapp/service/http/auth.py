"""Who may do what: the role of a token, or the loopback rule of a service without tokens."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from dosapp.errors import CorruptRecordError, InputError, unknown_name
from dosapp.service.service import Service
from dosapp.service.settings import is_loopback
from dosapp.service.tokens import LOCAL_CALLER, Caller, Role, Tokens

LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}
# Headers that proxies add: the sender may be on any machine.
FORWARDING = ("forwarded", "via", "x-forwarded", "x-real-ip", "x-original-", "x-client-ip",
              "true-client-ip", "cf-connecting-ip", "x-cluster-client-ip")  # fmt: skip
NO_TOKEN = (
    "this service needs a token, and the request has none; send the header "
    "'Authorization: Bearer TOKEN' (dosapp client: --token or DOSAPP_TOKEN)"
)
WRONG_TOKEN = (
    "this token is wrong or was removed; ask the service's operator for another "
    "(dosapp token add FOLDER NAME --role predict)"
)

logger = logging.getLogger("dosapp.service.http")
Bearer = Annotated[
    HTTPAuthorizationCredentials | None,
    Depends(HTTPBearer(auto_error=False, description="a token of `dosapp token add`")),
]


class RequireRole:
    """Dependency of a route: the caller must have a role, and stay within its rate.

    Args:
        role: The role that the route needs.
        takes_slot: Whether the request takes one of the caller's slots.
    """

    def __init__(self, role: Role, takes_slot: bool = True) -> None:
        self.role: Role = role
        self.takes_slot = takes_slot

    async def __call__(self, request: Request, credentials: Bearer) -> AsyncIterator[Caller]:
        """Identify the sender of a request, before anything of its body is read.

        Raises:
            BusyError: The caller sends too many requests.
            HTTPException: 401 without a valid token, 403 if the caller lacks the role.
        """
        state = request.app.state
        service = state.service
        caller = identify(request, credentials, service.tokens if service.settings.token else None)
        request.state.caller = caller.name
        if not caller.may(self.role):
            raise HTTPException(403, f"the token of '{caller.name}' may not {self.role}")
        check_query_names(request)
        if not self.takes_slot:
            yield caller
            return
        state.limits.check_rate(caller.name)
        with state.limits.hold_slot(caller.name) as slot:
            request.state.slot = slot
            if request.method == "GET":
                await asyncio.sleep(state.limits.reads.delay(caller.name))
            async with state.limits.wait_for_turn(caller.name, request.headers):
                yield caller


def check_query_names(request: Request) -> None:
    """Refuse parameters that a route does not have: `?lern=false` would be ignored.

    Raises:
        InputError: There is one.
    """
    route = request.scope.get("route")
    if isinstance(route, APIRoute):
        names = [field.alias for field in route.dependant.query_params]
        for given in request.query_params:
            if given not in names:
                if not names:
                    raise InputError(f"unknown parameter '{given[:40]}'; this route has none")
                raise unknown_name("parameter", given[:40], names)


# The caller of a route that reads or predicts; that changes the service, or shows who did; that
# freezes it, which must act at once and so waits for no slot.
PredictCaller = Annotated[Caller, Depends(RequireRole("predict"))]
TeachCaller = Annotated[Caller, Depends(RequireRole("teach"))]
FreezeCaller = Annotated[Caller, Depends(RequireRole("teach", takes_slot=False))]


def identify(
    request: Request, credentials: HTTPAuthorizationCredentials | None, tokens: Tokens | None
) -> Caller:
    """Find the caller by its token; a service without tokens trusts local requests only."""
    if tokens is None:
        if reason := find_foreign(request):
            raise HTTPException(
                403, f"without tokens only programs on this machine are answered, and {reason}"
            )
        return LOCAL_CALLER
    headers = {"WWW-Authenticate": "Bearer"}
    if credentials is None:
        raise HTTPException(401, NO_TOKEN, headers)
    try:
        caller = tokens.caller(credentials.credentials.strip())
    except CorruptRecordError as error:
        logger.error("%s", error)
        message = "the service's tokens cannot be read; its operator finds the reason in the log"
        raise HTTPException(503, message) from error
    if caller is None:
        raise HTTPException(401, WRONG_TOKEN, headers)
    return caller


def has_valid_token(service: Service, authorization: str) -> bool:
    """Whether a request with this header may have a role; decides how soon it is answered, only."""
    if not service.settings.token:
        return True
    kind, _, token = authorization.partition(" ")
    try:
        return kind.lower() == "bearer" and service.tokens.caller(token.strip()) is not None
    except CorruptRecordError:
        return False


def find_foreign(request: Request) -> str:
    """Say why a request may come from elsewhere: another machine, a proxy, another site's page."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    proxied = [name for name in request.headers if name.startswith(FORWARDING)]
    try:
        is_local_host = urlsplit(f"//{host}").hostname in LOCAL_HOSTS
        is_local_page = origin is None or urlsplit(origin).netloc == host
    except ValueError:
        is_local_host = is_local_page = False
    reasons = {
        "this request comes from another": (
            request.client is None or not is_loopback(request.client.host)
        ),
        f"a proxy has added the header '{proxied[0][:40] if proxied else ''}'": bool(proxied),
        # nginx, unless it is told otherwise
        "HTTP/1.0 is what a proxy speaks": request.scope.get("http_version") == "1.0",
        f"the host '{host[:80]}' is not this machine": not is_local_host,
        f"this request is of a page of '{(origin or '')[:80]}'": not is_local_page,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
