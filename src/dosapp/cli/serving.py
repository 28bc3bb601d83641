"""Commands to serve a learner, manage its tokens, and use a served one."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dosapp.cli.console import CommandGroup, Json, LearnerFolder, app, err, out
from dosapp.cli.flags import with_settings
from dosapp.errors import DosappError, InputError
from dosapp.runtime.plural import plural
from dosapp.service.settings import ServiceSettings, check_learner

if TYPE_CHECKING:
    from dosapp.learner.canary import Canary


@app.command()
@with_settings(ServiceSettings)
def serve(
    flags: dict[str, Any],
    learner: Annotated[Path | None, typer.Argument(help="a learner's folder")] = None,
    folder: Annotated[Path | None, typer.Option(help="the same, as an option")] = None,
    host: Annotated[str, typer.Option(help="where to listen")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    demo: Annotated[
        bool, typer.Option("--demo", help="create the learner if it does not exist: ten shapes")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="read only, and follow the versions of another process")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="readers next to one writer, on a Ray cluster")
    ] = None,
) -> None:
    """Serve a learner over HTTP, with a web page at /."""
    from dosapp.runtime.extras import check_extra

    for extra in ("serve", "ray") if replicas else ("serve",):
        check_extra("serving", extra)
    from dosapp.service import server

    path = learner or folder or (Path("my-learner") if demo else None)
    if path is None:
        raise InputError("no learner is given; give its folder, or --demo to create one")
    if replicas and follow:
        raise InputError("--replicas starts its own readers; leave out --follow")
    settings: ServiceSettings = ServiceSettings.parse(flags)

    def prepare() -> "Canary | None":
        if not demo or follow:
            return None
        with err.status("preparing the learner of the demo"):
            return server.prepare_demo(path)

    server.serve(
        path,
        settings,
        host=host,
        port=port,
        follow=follow,
        replicas=replicas,
        prepare=prepare,
        on_ready=err.print,
    )


token_app = CommandGroup(
    help="Tokens of a served learner: who may predict and train.", no_args_is_help=True
)
app.add_typer(token_app, name="token")


@token_app.command("add")
def token_add(
    folder: LearnerFolder,
    name: Annotated[str, typer.Argument(help="name of the holder")],
    role: Annotated[str, typer.Option(help="predict, or teach (which may also predict)")],
) -> None:
    """Create a token and print it once; only its hash is stored."""
    from dosapp.service.tokens import Tokens

    check_learner(folder)
    print(Tokens(folder).add(name, role))


@token_app.command("list")
def token_list(folder: LearnerFolder) -> None:
    """List names and roles."""
    from dosapp.service.tokens import Tokens

    check_learner(folder)
    tokens = Tokens(folder).known
    for name, entry in tokens.items():
        out.print(f"{name}: {entry.role}")
    if not tokens:
        err.print(f"there is no token; make one with: dosapp token add {folder} NAME --role teach")


@token_app.command("remove")
def token_remove(folder: LearnerFolder, name: str) -> None:
    """Remove a token; it stops working at once, also in a running service."""
    from dosapp.service.tokens import Tokens

    check_learner(folder)
    tokens = Tokens(folder)
    tokens.remove(name)
    out.print(f"removed the token of '{name}'; it works no longer")
    if not tokens.known:
        err.print(
            "note: it was the last one, so no request is answered now; make another with: "
            f"dosapp token add {folder} NAME --role teach"
        )


client_app = CommandGroup(
    help="Use a served learner: predict, train, correct, roll back.", no_args_is_help=True
)
app.add_typer(client_app, name="client")
Url = Annotated[str, typer.Option(envvar="DOSAPP_URL", help="address of the service")]
Token = Annotated[str | None, typer.Option(envvar="DOSAPP_TOKEN", help="if the service needs one")]
LOCAL_URL = "http://127.0.0.1:8000"


def _client(url: str, token: str | None) -> Any:
    from dosapp.service.client import Client

    return Client(url, token)


@client_app.command("predict")
def client_predict(
    images: Annotated[list[Path], typer.Argument(help="image files, or folders of them")],
    url: Url = LOCAL_URL,
    token: Token = None,
    top: int = 3,
    learn: Annotated[bool, typer.Option(help="adapt to these images")] = True,
    as_json: Json = False,
) -> None:
    """Classify images."""
    from dosapp.data.files import list_folder_images

    images = [i for path in images for i in (list_folder_images(path) if path.is_dir() else [path])]
    with _client(url, token) as client:
        answer = client.predict(images, top, learn)
        adaptation_off = client.status().get("adaptation_off", "") if learn else ""
    if as_json:
        print(json.dumps(answer))
        return
    for image, prediction in zip(images, answer["predictions"], strict=True):
        best = ", ".join(f"{c['label']} {c['score']:.0%}" for c in prediction["top"])
        out.print(f"{image}: {best}")
    out.print(f"version {answer['version']}", style="dim")
    _print_note(adaptation_off)


@client_app.command("learn")
def client_learn(
    session: Annotated[
        Path | None, typer.Argument(help="a zip or a folder of class folders; none: corrections")
    ] = None,
    url: Url = LOCAL_URL,
    token: Token = None,
    lr: Annotated[float | None, typer.Option(help="of this session [the learner's]")] = None,
    epochs: Annotated[int | None, typer.Option(help="of this session [the learner's]")] = None,
) -> None:
    """Train on labelled images, and wait until the new version answers."""
    with err.status("sending") as status:

        def show_progress(job: dict[str, Any]) -> None:
            status.update(f"{job['state']}: step {job['step']} of {job['of']}")

        job = _client(url, token).learn(session, on_progress=show_progress, lr=lr, epochs=epochs)
    if job["state"] != "done":
        raise DosappError(f"the session is {job['state']}: {job['said']}")
    out.print(f"version {job['version']}: {job['said']}")


@client_app.command("correct")
def client_correct(
    image: Path,
    label: str,
    url: Url = LOCAL_URL,
    token: Token = None,
    new_class: Annotated[
        bool, typer.Option("--new-class", help="the service does not know the class yet")
    ] = False,
) -> None:
    """Give the true label of an image; it is trained in the next session."""
    waiting = _client(url, token).correct(image, label, new_class)
    out.print(f"{plural(waiting, 'correction')} pending")


@client_app.command("forget")
def client_forget(url: Url = LOCAL_URL, token: Token = None) -> None:
    """Discard the pending corrections."""
    count = _client(url, token).forget_corrections()
    out.print(f"{plural(count, 'correction')} discarded")


@client_app.command("classes")
def client_classes(url: Url = LOCAL_URL, token: Token = None) -> None:
    """List the classes that the service knows."""
    for name in _client(url, token).classes():
        out.print(name)


@client_app.command("rename")
def client_rename(
    name: Annotated[str, typer.Argument(help="a known class")],
    to: Annotated[str, typer.Argument(help="its new name")],
    url: Url = LOCAL_URL,
    token: Token = None,
) -> None:
    """Rename a class; its captions change with it."""
    number = _client(url, token).rename(name, to)
    out.print(f"version {number}: '{name}' is now '{to}'")


@client_app.command("remove")
def client_remove(
    name: Annotated[str, typer.Argument(help="a known class")],
    url: Url = LOCAL_URL,
    token: Token = None,
) -> None:
    """Stop predicting a class."""
    number = _client(url, token).remove(name)
    out.print(f"version {number}: '{name}' is no longer predicted")


@client_app.command("rollback")
def client_rollback(version: int, url: Url = LOCAL_URL, token: Token = None) -> None:
    """Append a copy of an earlier version."""
    number = _client(url, token).rollback(version)
    out.print(f"version {number} is a copy of version {version}")


@client_app.command("freeze")
def client_freeze(url: Url = LOCAL_URL, token: Token = None) -> None:
    """Stop adapting to the stream."""
    note = _client(url, token).freeze()
    out.print("frozen: the service predicts and learns sessions, but does not adapt to its stream")
    _print_note(note)


@client_app.command("unfreeze")
def client_unfreeze(url: Url = LOCAL_URL, token: Token = None) -> None:
    """Adapt to the stream again."""
    note = _client(url, token).unfreeze()
    out.print("no longer frozen: the service adapts to its stream")
    _print_note(note)


def _print_note(note: str) -> None:
    if note:
        err.print(f"note: {note}")


@client_app.command("status")
def client_status(url: Url = LOCAL_URL, token: Token = None) -> None:
    """Print the state of the service as JSON."""
    print(json.dumps(_client(url, token).status(), indent=1))


@client_app.command("versions")
def client_versions(url: Url = LOCAL_URL, token: Token = None) -> None:
    """List the versions of the service."""
    for v in _client(url, token).versions():
        out.print(f"{v['number']:>5}  {v['created']}  {v['reason']}")
