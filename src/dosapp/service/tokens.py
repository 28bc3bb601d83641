"""The token store: bearer tokens by name and role; only their hashes are kept."""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dosapp.errors import CorruptRecordError, DosappError, InputError
from dosapp.runtime.files import read_bytes, take_turn, write_json

Role = Literal["predict", "teach"]  # "teach" includes "predict"
FIRST_NAME = "owner"  # of the token that is made at the first start


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """Whether the caller's role includes another."""
        return self.role in (role, "teach")


LOCAL_CALLER = Caller("localhost", "teach")  # on the loopback of a service without tokens


class TokenEntry(BaseModel):
    """What is stored of a token."""

    model_config = ConfigDict(extra="forbid")

    role: Role
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


_ENTRIES = TypeAdapter(dict[Annotated[str, Field(min_length=1)], TokenEntry])


class Tokens:
    """`tokens.json` in a learner's folder: name → role and hash.

    The file is read again whenever it has changed, so that a removed token stops working at once.
    Without the file no token is accepted. A file that cannot be used is an error, and no token is
    accepted either.

    Example:
        >>> import tempfile
        >>> tokens = Tokens(Path(tempfile.mkdtemp()))
        >>> tokens.caller(tokens.add("alice", "predict"))
        Caller(name='alice', role='predict')
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.json"
        self._entries: dict[str, TokenEntry] = {}
        self._state: tuple[int, ...] = ()  # of the file when it was read; empty: there was none

    @property
    def known(self) -> dict[str, TokenEntry]:
        """All tokens by name, as the file has them now.

        Raises:
            CorruptRecordError: The file cannot be read or is not a list of tokens.
        """
        try:
            state = _file_state(self.path)
            if state != self._state:
                self._entries = _ENTRIES.validate_json(read_bytes(self.path)) if state else {}
                self._state = state
        except (OSError, DosappError, ValidationError) as error:
            self._state = (-1,)  # so that it is read again
            reason = _describe(error) if isinstance(error, ValidationError) else str(error)
            raise CorruptRecordError(
                f"'{self.path}' cannot be used ({reason}), so no token is accepted; mend the "
                "file, or delete it and make new tokens with: dosapp token add"
            ) from error
        return self._entries

    def add(self, name: str, role: str) -> str:
        """Create a token and return it; afterwards only its hash is known.

        Raises:
            InputError: The role does not exist, or the name is empty or taken.
        """
        if role not in get_args(Role):
            raise InputError(f"role is '{role}'; give {' or '.join(get_args(Role))}")
        token = f"dosapp-{secrets.token_urlsafe(32)}"
        entry = TokenEntry.model_validate({"role": role, "sha256": _hash(token)})
        with take_turn(self.path.parent):  # another process could bring back a removed token
            known = self.known
            if not name.strip() or name in known:
                raise InputError(f"a token named '{name}' cannot be added; give a new name")
            self._write({**known, name: entry})
        return token

    def add_first(self) -> str | None:
        """Create a token that may teach, if there never was one; otherwise return None."""
        return None if self.path.exists() else self.add(FIRST_NAME, "teach")

    def remove(self, name: str) -> None:
        """Revoke a token. A running service refuses its next request."""
        with take_turn(self.path.parent):
            known = dict(self.known)
            if known.pop(name, None) is None:
                names = ", ".join(known) or "none"
                raise InputError(f"there is no token named '{name}'; known: {names}")
            self._write(known)

    def caller(self, token: str) -> Caller | None:
        """Find the owner of a token. Every hash is compared, each in constant time."""
        caller, digest = None, _hash(token)
        for name, entry in self.known.items():
            if hmac.compare_digest(digest, entry.sha256):
                caller = Caller(name, entry.role)
        return caller

    def _write(self, entries: dict[str, TokenEntry]) -> None:
        write_json(self.path, {name: entry.model_dump() for name, entry in entries.items()})


def _file_state(path: Path) -> tuple[int, ...]:
    """Numbers that differ if a file has been written; none if there is no file."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _describe(error: ValidationError) -> str:
    first = error.errors(include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"].lower()]))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
