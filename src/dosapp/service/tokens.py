"""The token store: bearer tokens by name and role; only their hashes are kept."""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dosapp.errors import InputError
from dosapp.runtime.files import read_json, write_json

Role = Literal["predict", "teach"]  # "teach" includes "predict"


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """Whether the caller's role includes another."""
        return self.role in (role, "teach")


LOCAL_CALLER = Caller("localhost", "teach")  # on the loopback of a service without tokens


class Tokens:
    """`tokens.json` in a learner's folder: name → role and hash.

    Example:
        >>> import tempfile
        >>> tokens = Tokens(Path(tempfile.mkdtemp()))
        >>> tokens.caller(tokens.add("alice", "predict"))
        Caller(name='alice', role='predict')
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.json"
        self.known: dict[str, dict[str, str]] = read_json(self.path) if self.path.exists() else {}

    def __bool__(self) -> bool:
        return bool(self.known)

    def add(self, name: str, role: str) -> str:
        """Create a token and return it; afterwards only its hash is known.

        Raises:
            InputError: The role does not exist, or the name is empty or taken.
        """
        if role not in get_args(Role):
            raise InputError(f"role is '{role}'; give {' or '.join(get_args(Role))}")
        if not name.strip() or name in self.known:
            raise InputError(f"a token named '{name}' cannot be added; give a new name")
        token = f"dosapp-{secrets.token_urlsafe(32)}"
        self.known[name] = {"role": role, "sha256": _hash(token)}
        write_json(self.path, self.known)
        return token

    def remove(self, name: str) -> None:
        """Revoke a token; a running service reads the file at its next start."""
        if name not in self.known:
            raise InputError(f"there is no token named '{name}'; known: {', '.join(self.known)}")
        del self.known[name]
        write_json(self.path, self.known)

    def caller(self, token: str) -> Caller | None:
        """Find the owner of a token. Every hash is compared, each in constant time."""
        caller, digest = None, _hash(token)
        for name, entry in self.known.items():
            if hmac.compare_digest(digest, entry["sha256"]):
                caller = Caller(name, "teach" if entry["role"] == "teach" else "predict")
        return caller


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
