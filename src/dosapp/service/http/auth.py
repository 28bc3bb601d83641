"""Who may do what: the role of a token, or the loopback rule of a service without tokens."""

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request

from dosapp.service.settings import is_loopback
from dosapp.service.tokens import LOCAL_CALLER, Caller, Role, Tokens

LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


async def require_predict(request: Request) -> Caller:
    """Dependency of routes that only read."""
    return authorize(request, "predict")


async def require_teach(request: Request) -> Caller:
    """Dependency of routes that change the learner, or show who did."""
    return authorize(request, "teach")


PredictCaller = Annotated[Caller, Depends(require_predict)]
TeachCaller = Annotated[Caller, Depends(require_teach)]


def authorize(request: Request, role: Role) -> Caller:
    """Identify the sender of a request and check its role and its rate.

    Raises:
        BusyError: The client sends too many requests.
        HTTPException: 401 without a valid token, 403 if the caller lacks the role.
    """
    state = request.app.state
    state.limits.check_rate(request.client.host if request.client else "")
    caller = identify(request, state.service.tokens)
    request.state.caller = caller.name
    if not caller.may(role):
        raise HTTPException(403, f"the token of '{caller.name}' may not {role}")
    return caller


def identify(request: Request, tokens: Tokens) -> Caller:
    """Find the caller by its token; without tokens every local request has all rights."""
    if not tokens:
        if not is_local(request):
            raise HTTPException(
                403, "without tokens only this machine is answered, and no other site's pages"
            )
        return LOCAL_CALLER
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    caller = tokens.caller(token.strip()) if scheme.lower() == "bearer" else None
    if caller is None:
        headers = {"WWW-Authenticate": "Bearer"}
        raise HTTPException(401, "give a token: Authorization: Bearer …", headers)
    return caller


def is_local(request: Request) -> bool:
    """Whether a request comes from this machine, and not from another site's page in a browser."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if request.client is None or not is_loopback(request.client.host):
        return False
    try:
        is_local_host = urlsplit(f"//{host}").hostname in LOCAL_HOSTS
        return is_local_host and (origin is None or urlsplit(origin).netloc == host)
    except ValueError:
        return False
