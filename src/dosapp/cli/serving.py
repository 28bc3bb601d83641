"""Commands of the engineer: serve a learner, ask it, say who may."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dosapp.cli.console import Json, LearnerFolder, app, err, out
from dosapp.cli.flags import with_settings
from dosapp.errors import InputError
from dosapp.service.settings import ServiceSettings, check_learner


@app.command()
@with_settings(ServiceSettings)
def serve(
    flags: dict[str, Any],
    learner: Annotated[Path | None, typer.Argument(help="a learner's folder")] = None,
    folder: Annotated[Path | None, typer.Option(help="the same, as an option")] = None,
    host: Annotated[str, typer.Option(help="other than this machine needs a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    demo: Annotated[
        bool, typer.Option("--demo", help="make the learner if it is not there: ten shapes")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="only read, and follow the writer's versions")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="readers beside one writer, on a Ray cluster")
    ] = None,
) -> None:
    """Serve a learner over HTTP, with a page at /."""
    from dosapp.service.server import demo as prepared
    from dosapp.service.server import serve as run

    place = learner or folder or (Path("my-learner") if demo else None)
    if place is None:
        raise InputError("which learner? give its folder, or --demo to make one")
    if replicas and follow:
        raise InputError("--replicas has readers of its own; leave out --follow")
    settings: ServiceSettings = ServiceSettings.parse(flags)
    canary = None
    if demo and not follow:
        with err.status("preparing the demo's learner"):
            canary = prepared(place)

    def watch(words: str) -> None:
        err.print(words)
        err.print(f"http://{host}:{port}/  the page, /docs the interface; Ctrl-C ends")

    run(
        place,
        settings,
        host=host,
        port=port,
        follow=follow,
        replicas=replicas,
        canary=canary,
        watch=watch,
    )


token_app = typer.Typer(help="Who may ask and teach a served learner.", no_args_is_help=True)
app.add_typer(token_app, name="token")


@token_app.command("add")
def token_add(
    folder: LearnerFolder,
    name: Annotated[str, typer.Argument(help="whose")],
    role: Annotated[str, typer.Option(help="predict, or teach (which may also predict)")],
) -> None:
    """A new token, shown once; only its hash is kept."""
    from dosapp.service.tokens import Tokens

    check_learner(folder)
    print(Tokens(folder).add(name, role))


@token_app.command("list")
def token_list(folder: LearnerFolder) -> None:
    """Names and roles."""
    from dosapp.service.tokens import Tokens

    for name, facts in Tokens(folder).known.items():
        out.print(f"{name}: {facts['role']}")


@token_app.command("remove")
def token_remove(folder: LearnerFolder, name: str) -> None:
    """From the service's next start on this token is nobody's."""
    from dosapp.service.tokens import Tokens

    Tokens(folder).remove(name)


client_app = typer.Typer(help="Ask and teach a learner that is served.", no_args_is_help=True)
app.add_typer(client_app, name="client")
Url = Annotated[str, typer.Option(envvar="DOSAPP_URL", help="where the service is")]
Token = Annotated[str | None, typer.Option(envvar="DOSAPP_TOKEN", help="if it wants one")]
HERE = "http://127.0.0.1:8000"


def _client(url: str, token: str | None) -> Any:
    from dosapp.service.client import Client

    return Client(url, token)


@client_app.command("predict")
def client_predict(
    images: Annotated[list[Path], typer.Argument(help="pictures")],
    url: Url = HERE,
    token: Token = None,
    top: int = 3,
    learn: Annotated[bool, typer.Option(help="let them join the stream")] = True,
    as_json: Json = False,
) -> None:
    """What the pictures show."""
    found = _client(url, token).predict(images, top, learn)
    if as_json:
        print(json.dumps(found))
        return
    for image, one in zip(images, found["predictions"], strict=True):
        best = ", ".join(f"{guess['label']} {guess['score']:.0%}" for guess in one["top"])
        out.print(f"{image}: {best}")
    out.print(f"version {found['version']}", style="dim")


@client_app.command("learn")
def client_learn(
    lesson: Annotated[
        Path | None, typer.Argument(help="a zip or a folder of class folders; none: corrections")
    ] = None,
    url: Url = HERE,
    token: Token = None,
) -> None:
    """Teach, and wait until the new version answers."""
    with err.status("sending") as status:

        def watch(job: dict[str, Any]) -> None:
            status.update(f"{job['state']}: step {job['step']} of {job['of']}")

        job = _client(url, token).learn(lesson, watch=watch)
    if job["state"] != "done":
        raise InputError(f"the lesson is {job['state']}: {job['said']}")
    out.print(f"version {job['version']}: {job['said']}")


@client_app.command("correct")
def client_correct(image: Path, label: str, url: Url = HERE, token: Token = None) -> None:
    """Say what a picture really is; it joins the next lesson."""
    out.print(f"{_client(url, token).correct(image, label)} correction(s) wait")


@client_app.command("forget")
def client_forget(url: Url = HERE, token: Token = None) -> None:
    """Forget the corrections that wait."""
    out.print(f"{_client(url, token).forget_corrections()} correction(s) forgotten")


@client_app.command("rollback")
def client_rollback(version: int, url: Url = HERE, token: Token = None) -> None:
    """Back to a version, as a new one."""
    made = _client(url, token).rollback(version)
    out.print(f"version {made} is what version {version} was")


@client_app.command("freeze")
def client_freeze(url: Url = HERE, token: Token = None) -> None:
    """Stop learning from the stream."""
    _note(_client(url, token).freeze())


@client_app.command("unfreeze")
def client_unfreeze(url: Url = HERE, token: Token = None) -> None:
    """Learn from the stream again."""
    _note(_client(url, token).unfreeze())


def _note(trouble: str) -> None:
    if trouble:
        err.print(f"note: {trouble}")


@client_app.command("status")
def client_status(url: Url = HERE, token: Token = None) -> None:
    """How it is, as JSON."""
    print(json.dumps(_client(url, token).status(), indent=1))


@client_app.command("versions")
def client_versions(url: Url = HERE, token: Token = None) -> None:
    """Every version the service knows."""
    for v in _client(url, token).versions():
        out.print(f"{v['number']:>5}  {v['created']}  {v['reason']}")
