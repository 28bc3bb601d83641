"""The service's page in a real browser, against a real service."""

import base64
import contextlib
import io
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")
from playwright.sync_api import JSHandle, Page, expect

from dosapp.drills.service_process import png
from dosapp.learner.learner import Learner
from dosapp.service.guards import Canary
from dosapp.service.http.app import PAGE
from dosapp.service.service import Service, open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from support.services import at_a_port, hold_the_writer, taught
from support.settings import in_a_browser

QUICK = {"adapt_batch": 8, "interval": 1, "threads": 1, "batch_wait": 0.0}


@pytest.fixture(scope="module")
def made(_loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught") / "learner"
    return folder, taught(_loaded, folder, batch_size=2, all_class_negatives=True)


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "learner"))


@pytest.fixture
def stream(made):
    return made[1]


@pytest.fixture
def served(folder) -> Iterator[Callable[..., tuple[str, Service]]]:
    """Starts the service on a free port: its address, and itself."""
    with contextlib.ExitStack() as stack:

        def make(**changes: object) -> tuple[str, Service]:
            more = {name: changes.pop(name) for name in ("canary", "follow") if name in changes}
            settings: ServiceSettings = ServiceSettings.parse({**QUICK, **changes})
            service = stack.enter_context(open_service(folder, settings, **more))
            return stack.enter_context(at_a_port(service)), service

        yield make


@pytest.fixture
def visit(browser, served):  # pages close before their service does
    """Opens the page. In the end nothing was complained about, and nobody else was asked."""
    said: list[str] = []
    contexts = []

    def make(url: str, width: int = 1280, clock: bool = False, tolerated: str = "-", **more):
        context = browser.new_context(viewport={"width": width, "height": 800}, **more)
        contexts.append(context)
        page = context.new_page()
        if clock:
            page.clock.install()
        known = f"the server responded with a status of {tolerated}"
        page.on("console", lambda m: said.append(m.text) if known not in m.text else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        here = (url, "blob:" + url, "data:")
        page.on("request", lambda r: None if r.url.startswith(here) else said.append(r.url))
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert said == []


def files(stream, task: int = 0, count: int = 8) -> list[dict]:
    """Pictures as the browser's file inputs take them."""
    made = []
    for n, picture in enumerate(stream.tasks[task].test.read(range(count))):
        made.append({"name": f"{n}.png", "mimeType": "image/png", "buffer": png(picture)})
    return made


def clipboard(page: Page, file: dict) -> JSHandle:
    """A picture as it is dropped or pasted."""
    return page.evaluate_handle(
        """([name, data]) => {
          const moved = new DataTransfer();
          const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt());
          moved.items.add(new File([bytes], name, { type: "image/png" }));
          return moved;
        }""",
        [file["name"], base64.b64encode(file["buffer"]).decode()],
    )


@contextlib.contextmanager
def busy_writer(service) -> Iterator[None]:
    """The writer has no time for anything else in here."""
    hold = hold_the_writer(service)
    try:
        yield
    finally:
        hold.set()


def focused(page, what: str = "id") -> str:
    return page.evaluate(f"document.activeElement.{what}")


def tab_to(page, selector: str) -> list[str]:
    """Presses Tab until it is there; says what was passed on the way."""
    passed = []
    for _ in range(80):
        page.keyboard.press("Tab")
        passed.append(focused(page) or focused(page, "innerText"))
        if page.evaluate("wanted => document.activeElement.matches(wanted)", selector):
            return passed
    raise AssertionError(f"Tab never reaches {selector}, only {passed}")


def test_the_page_asks_nobody_else_and_writes_text_only() -> None:
    text = PAGE.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert word not in text
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}


@in_a_browser
def test_the_interface_is_shown_without_anybody_elses_scripts(served, visit) -> None:
    url, _ = served()
    page = visit(url)
    page.goto(url + "docs")
    expect(page.locator(".opblock-summary-path", has_text="/predict")).to_be_visible()
    page.locator("#operations-default-health_health_get").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table .response-col_status").last).to_have_text("200")


@in_a_browser
class TestAsking:
    def test_chosen_dropped_and_pasted_pictures_are_answered(
        self, folder, served, stream, visit
    ) -> None:
        known = Learner.load(folder).classes
        url, _ = served(adapt=False)
        page = visit(url)
        cards = page.locator("#answers .card")
        page.set_input_files("#ask-files", files(stream, count=3))
        expect(cards.locator(".bars")).to_have_count(3)
        assert set(cards.locator("h3").all_inner_texts()) <= set(known)
        assert cards.locator("small").all_inner_texts() == ["version 1"] * 3
        assert sorted(cards.first.locator(".bars li > :first-child").all_inner_texts()) == (
            sorted(known))  # fmt: skip
        expect(page.locator("#announced")).to_contain_text("3 pictures: ")

        moved = clipboard(page, files(stream, count=1)[0])
        page.locator("#ask .drop").dispatch_event("drop", {"dataTransfer": moved})
        expect(cards.locator(".bars")).to_have_count(4)
        page.evaluate(
            """moved => document.body.dispatchEvent(
              new ClipboardEvent("paste", { clipboardData: moved, bubbles: true }))""",
            moved,
        )
        expect(cards.locator(".bars")).to_have_count(5)
        page.get_by_role("button", name="Clear the answers").click()
        expect(cards).to_have_count(0)

    def test_below_a_score_it_is_unknown(self, served, stream, visit) -> None:
        url, service = served()
        service.settings = service.settings.model_copy(update={"unknown": 2.0})
        page = visit(url)
        page.set_input_files("#ask-files", files(stream, count=1))
        expect(page.locator("#answers h3.unsure")).to_have_text("unknown")
        expect(page.locator("#answers .bars li")).to_have_count(3)

    def test_what_cannot_be_read_is_said_on_its_card(self, served, stream, visit) -> None:
        broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"}
        url, _ = served()
        page = visit(url, tolerated="400")
        page.set_input_files("#ask-files", [broken, *files(stream, count=1)])
        expect(page.locator("#answers .bars")).to_have_count(1)
        expect(page.locator("#answers .error")).to_contain_text("'broken.png' is not a picture")

    def test_a_busy_service_can_be_asked_again(self, served, stream, visit) -> None:
        url, service = served()
        page = visit(url, tolerated="429")
        service.reader.waiting = 10**9  # as if so many waited
        page.set_input_files("#ask-files", files(stream, count=1))
        expect(page.locator("#answers .error")).to_contain_text("busy, try again")
        service.reader.waiting = 0
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#answers .bars")).to_have_count(1)

    def test_corrections_wait_and_are_learned(self, folder, served, stream, visit) -> None:
        name = Learner.load(folder).classes[0]
        url, _ = served(adapt=False)
        page = visit(url)
        page.set_input_files("#ask-files", files(stream, count=2))
        for n in (1, 2):
            page.get_by_role("button", name="That's wrong").first.click()
            page.get_by_label("What is it?").fill(name)
            page.keyboard.press("Enter")
            expect(page.get_by_text(f"Noted: {name}.")).to_have_count(n)
            expect(page.locator("#corrections")).to_contain_text(f"{n} correction")
        page.get_by_role("button", name="Learn from them").click()
        expect(page.locator("#ask-jobs")).to_have_text(
            f"Learned {name} from 2 pictures: version 2 answers now.")  # fmt: skip
        expect(page.locator("#corrections")).to_be_hidden()
        expect(page.locator("tr.now")).to_contain_text(f"taught {name}")

    def test_corrections_can_be_forgotten(self, folder, served, stream, visit) -> None:
        url, service = served(adapt=False)
        page = visit(url)
        page.set_input_files("#ask-files", files(stream, count=1))
        page.get_by_role("button", name="That's wrong").click()
        page.get_by_label("What is it?").fill("a slip")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Forget them").click()
        expect(page.locator("#corrections")).to_be_hidden()
        assert service.status()["corrections"] == 0


@in_a_browser
class TestTeaching:
    def test_a_class_by_name_and_pictures(self, served, stream, visit) -> None:
        name = "<i>fox</i>"  # other people's text
        url, _ = served(adapt=False)
        page = visit(url)
        expect(page.locator("#classes li")).to_have_count(3)
        teach = page.get_by_role("button", name="Teach", exact=True)
        teach.click()
        expect(page.locator("#lesson .error")).to_have_text("give the class a name")
        page.get_by_label("Its name").fill(name)
        teach.click()
        expect(page.locator("#lesson .error")).to_have_text("give at least one picture")
        page.set_input_files("#lesson-files", files(stream, 1, 3))
        page.set_input_files("#lesson-files", files(stream, 1, 1))
        teach.click()
        expect(page.locator("#teach-jobs")).to_have_text(
            f"Learned {name} from 4 pictures: version 2 answers now.")  # fmt: skip
        expect(page.locator("#classes li")).to_have_count(4)
        expect(page.locator("#classes li").last).to_contain_text(name)
        expect(page.locator("#state")).to_contain_text("version 2 · 4 classes")
        expect(page.locator("#lesson img")).to_have_count(0)

    def test_a_zip_of_classes_while_another_page_watches(self, served, stream, visit) -> None:
        with io.BytesIO() as buffer:
            with zipfile.ZipFile(buffer, "w") as archive:
                for n, image in enumerate(files(stream, 1, 8)):
                    archive.writestr(f"{'fox' if n % 2 else 'owl'}/{n}.png", image["buffer"])
            lesson = {"name": "l.zip", "mimeType": "application/zip", "buffer": buffer.getvalue()}
        url, service = served(adapt=False)
        page, other = visit(url), visit(url)
        with busy_writer(service):
            page.set_input_files("#archive-file", lesson)
            page.get_by_role("button", name="Teach the zip").click()
            for one in (page, other):
                expect(one.locator("#teach-jobs")).to_contain_text("Waiting to learn fox, owl")
                expect(one.get_by_role("progressbar", name="Lesson: fox, owl")).to_be_visible()
        for one in (page, other):
            expect(one.locator("#teach-jobs")).to_contain_text("Learned fox, owl")
            expect(one.locator("#classes li")).to_have_count(5)

    def test_a_lesson_can_be_given_up(self, served, stream, visit) -> None:
        url, service = served(adapt=False)
        page = visit(url)
        with busy_writer(service):
            page.get_by_label("Its name").fill("fox")
            page.set_input_files("#lesson-files", files(stream, 1, 2))
            page.get_by_role("button", name="Teach", exact=True).click()
            page.locator("#teach-jobs").get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("button", name="Cancelling…")).to_be_visible()
        expect(page.locator("#teach-jobs")).to_have_text(
            "Cancelled: fox, given up; nothing has changed.")  # fmt: skip
        expect(page.locator("#classes li")).to_have_count(3)

    def test_classes_are_renamed_and_removed(self, folder, served, visit) -> None:
        first, second, third = Learner.load(folder).classes
        url, _ = served(adapt=False)
        page = visit(url, tolerated="400")
        page.get_by_role("button", name=f"Rename {first}").click()
        field = page.get_by_label("New name")
        expect(field).to_be_focused()
        field.fill(second)
        page.keyboard.press("Enter")
        expect(page.locator("dialog .error")).to_contain_text(f"'{second}' is there already")
        field.fill("fox")
        page.keyboard.press("Enter")
        expect(page.locator("#classes li > span").first).to_have_text("fox")
        page.get_by_role("button", name=f"Remove {third}").click()
        page.locator("dialog").get_by_role("button", name="Remove").click()
        expect(page.locator("#classes li > span")).to_have_text(["fox", second])


@in_a_browser
class TestWatching:
    def test_the_stream_is_shown(self, served, stream, visit) -> None:
        test = stream.tasks[0].test
        pixels = (test.read(range(len(test))) * 255).round().byte()
        canary = Canary(pixels, [stream.tasks[0].classes[n] for n in test.labels])
        url, service = served(canary=canary, canary_drop=100.0)
        page = visit(url)
        expect(page.locator("#histogram")).to_have_text("Nothing yet.")
        page.set_input_files("#ask-files", files(stream))
        tile = page.locator("#tiles > div")
        expect(tile.filter(has_text="answered").locator("dd")).to_have_text("8")
        expect(tile.filter(has_text="learned from").locator("dd")).to_have_text("8")
        expect(page.locator("tr.now")).to_contain_text("1 steps on the stream")
        page.set_input_files("#ask-files", files(stream))
        expect(page.get_by_role("img", name="canary accuracy, versions 2 to 3")).to_be_visible()
        for name in ("pictures per second", "confidence", "disagreement"):
            assert page.get_by_role("img", name=name).locator("path").count() >= 2
        counted = service.status()["signals"]["histogram"]
        expect(page.locator("#histogram li")).to_have_text([f"{n}{c}" for n, c in counted.items()])
        page.get_by_text("it may learn from them").uncheck()
        page.set_input_files("#ask-files", files(stream, count=2))
        expect(tile.filter(has_text="answered").locator("dd")).to_have_text("18")
        assert service.writer.waiting == 0

    def test_a_hidden_page_does_not_ask(self, served, visit) -> None:
        url, _ = served()
        page = visit(url, clock=True)
        expect(page.locator("tr.now")).to_be_visible()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        hide = """hidden => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
        page.evaluate(hide, True)
        page.clock.run_for(10_000)
        assert asked == []
        with page.expect_response("**/status"):
            page.evaluate(hide, False)
        with page.expect_response("**/status"):
            page.clock.run_for(5_000)

    def test_trouble_is_said_and_forgotten(self, served, visit) -> None:
        url, _ = served()
        page = visit(url, tolerated="500")
        expect(page.locator("tr.now")).to_be_visible()
        page.route("**/status", lambda route: route.fulfill(
            status=500, body="oh", content_type="text/plain"))  # fmt: skip
        expect(page.locator("#trouble")).to_have_text("the service answered 500")
        page.unroute("**/status")
        expect(page.locator("#trouble")).to_be_empty()


@in_a_browser
class TestVersions:
    def test_back_to_a_version(self, served, visit) -> None:
        url, service = served(adapt=False)
        service.rename(service.classes[0], "fox", "test")
        page = visit(url)
        rows = page.locator("#rows tr")
        expect(rows).to_have_count(2)
        back = page.get_by_role("button", name="Roll back to version 1")
        back.click()
        page.locator("dialog").get_by_role("button", name="Cancel").click()
        expect(page.locator("dialog")).to_have_count(0)
        assert service.version == 2
        back.click()
        expect(page.locator("dialog")).to_contain_text("“taught for the tests”, with 3 classes")
        page.locator("dialog").get_by_role("button", name="Roll back").click()
        expect(rows).to_have_count(3)
        expect(page.locator("tr.now")).to_contain_text("rolled back to version 1")
        expect(page.locator("#classes li").filter(has_text="fox")).to_have_count(0)
        expect(back).to_be_focused()

    def test_freeze_and_unfreeze(self, served, visit) -> None:
        url, service = served()
        page = visit(url)
        page.get_by_role("button", name="Freeze").click()
        page.locator("dialog").get_by_role("button", name="Freeze").click()
        expect(page.locator("#frozen")).to_contain_text("Frozen: by anybody.")
        assert service.status()["frozen"]
        page.get_by_role("button", name="Unfreeze").click()
        page.locator("dialog").get_by_role("button", name="Unfreeze").click()
        expect(page.locator("#frozen")).to_be_empty()
        expect(page.locator("#freeze")).to_have_text("Freeze")
        assert not service.status()["frozen"]


@in_a_browser
class TestWhoMay:
    def test_a_token_is_asked_for_and_kept_in_the_tab(self, folder, served, visit) -> None:
        token = Tokens(folder).add("me", "teach")
        url, _ = served()
        page = visit(url, tolerated="401")
        expect(page.get_by_label("Token", exact=True)).to_be_focused()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Give a token").click()
        page.get_by_label("Token", exact=True).fill("a wrong one")
        page.keyboard.press("Enter")
        expect(page.locator("dialog")).to_contain_text("The last one was not accepted.")
        page.get_by_label("Token", exact=True).fill(token)
        page.keyboard.press("Enter")
        expect(page.locator("#classes li")).to_have_count(3)
        page.reload()
        expect(page.locator("#classes li")).to_have_count(3)
        expect(page.locator("dialog")).to_have_count(0)
        assert page.evaluate("localStorage.length") == 0
        page.get_by_role("button", name="Forget the token").click()
        expect(page.get_by_role("button", name="Give a token")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0

    def test_who_may_not_is_told_in_the_dialog(self, folder, served, visit) -> None:
        token = Tokens(folder).add("guest", "predict")
        url, _ = served()
        page = visit(url, tolerated="40")  # 401, then 403
        page.get_by_label("Token", exact=True).fill(token)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Freeze").click()
        page.locator("dialog").get_by_role("button", name="Freeze").click()
        expect(page.locator("dialog .error")).to_have_text("the token of 'guest' may not teach")

    def test_a_replica_shows_no_teaching(self, served, stream, visit) -> None:
        url, _ = served(follow=True)
        page = visit(url)
        expect(page.locator("#teach")).to_contain_text("This replica only reads")
        page.set_input_files("#ask-files", files(stream, count=1))
        expect(page.locator("#answers .bars")).to_have_count(1)
        for name in ("Teach", "Rename", "Remove", "Roll back", "Freeze", "That's wrong"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)


@in_a_browser
class TestForEverybody:
    def test_tab_reaches_every_control_and_keys_work_them(self, served, stream, visit) -> None:
        url, service = served()
        service.rename(service.classes[0], "fox", "test")
        page = visit(url)
        page.on("filechooser", lambda chooser: chooser.set_files(files(stream, count=1)))
        expect(page.locator("tr.now")).to_be_visible()
        passed = tab_to(page, "#rows button")
        wanted = """Teach ask-files joins lesson-name lesson-files archive-file Teach the zip
                    Rename Remove freeze Roll back"""
        found = [name for name in dict.fromkeys(passed) if name in wanted]
        assert " ".join(found) == " ".join(wanted.split())

        for n, key in enumerate(("Enter", "Space")):
            page.locator("#ask-files").focus()
            page.keyboard.press(key)
            expect(page.locator("#answers .bars")).to_have_count(n + 1)

        page.locator("#archive .main").focus()
        tab_to(page, "#freeze")
        page.keyboard.press("Enter")
        expect(page.locator("dialog")).to_be_visible()
        for _ in range(6):  # the rest of the page is out of reach
            assert not page.evaluate("!!document.activeElement.closest('main, header')")
            page.keyboard.press("Tab")
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_have_count(0)
        expect(page.locator("#freeze")).to_be_focused()
        page.keyboard.press("Space")
        expect(page.locator("dialog").get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#frozen")).to_contain_text("Frozen")

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_a_phone_needs_no_sideways_scrolling(self, served, stream, visit, scheme) -> None:
        url, service = served(adapt=False)
        service.rename(service.classes[0], "fox" * 60, "test")
        page = visit(url, 360, color_scheme=scheme, reduced_motion="reduce")
        page.set_input_files("#ask-files", files(stream, count=4))
        expect(page.locator("#answers .bars")).to_have_count(4)
        page.get_by_role("button", name="That's wrong").first.click()
        expect(page.locator("tr.now")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.get_by_role("button", name="Roll back").click()
        box = page.locator("dialog").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
