"""The service's page in a real browser, against a real service."""

import base64
import contextlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")
from playwright.sync_api import JSHandle, Page, Route, expect
from starlette.testclient import TestClient

from dosapp.data.preprocess import to_bytes
from dosapp.drills.service_process import encode_png
from dosapp.learner.canary import Canary
from dosapp.learner.learner import Learner
from dosapp.service.http.app import build_app
from dosapp.service.http.routes import STATIC
from dosapp.service.service import Service, open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from support.services import block_writer, save_trained_learner, serve_at_port
from support.settings import in_a_browser

QUICK = {"adapt_batch_size": 8, "interval": 1, "threads": 1, "batch_wait": 0.0,
         "token": False, "require_canary": False, "canary_share": 0.0}  # fmt: skip


@pytest.fixture(scope="module")
def saved_learner(loaded_tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "learner"
    return folder, save_trained_learner(loaded_tiny, folder, batch_size=2, all_class_negatives=True)


@pytest.fixture
def served(folder) -> Iterator[Callable[..., tuple[str, Service]]]:
    """Start the service on a free port; return its address and itself."""
    with contextlib.ExitStack() as stack:

        def make(**changes: object) -> tuple[str, Service]:
            more = {name: changes.pop(name) for name in ("canary", "follow") if name in changes}
            settings: ServiceSettings = ServiceSettings.parse({**QUICK, **changes})
            service = stack.enter_context(open_service(folder, settings, **more))
            return stack.enter_context(serve_at_port(service)), service

        yield make


@pytest.fixture
def visit(browser, served):  # pages close before their service does
    """Open the page. At the end the console is empty, so there was neither an error nor a violation
    of the content security policy; and no request went elsewhere."""
    problems: list[str] = []
    contexts = []

    def make(url: str, width: int = 1280, clock: bool = False, tolerated: str = "-", **more):
        context = browser.new_context(viewport={"width": width, "height": 800}, **more)
        contexts.append(context)
        page = context.new_page()
        if clock:
            page.clock.install()
        known = f"the server responded with a status of {tolerated}"
        page.on("console", lambda m: problems.append(m.text) if known not in m.text else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        home = url.partition("#")[0]
        here = (home, "blob:" + home, "data:")
        page.on("request", lambda r: None if r.url.startswith(here) else problems.append(r.url))
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert problems == []


def files(scenario, task: int = 0, count: int = 8) -> list[dict]:
    """Images as the browser's file inputs take them."""
    images = scenario.tasks[task].test.read(range(count))
    return [
        {"name": f"{n}.png", "mimeType": "image/png", "buffer": encode_png(image)}
        for n, image in enumerate(images)
    ]


def clipboard(page: Page, file: dict) -> JSHandle:
    """An image as it is dropped or pasted."""
    return page.evaluate_handle(
        """([name, data]) => {
          const transfer = new DataTransfer();
          const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt());
          transfer.items.add(new File([bytes], name, { type: "image/png" }));
          return transfer;
        }""",
        [file["name"], base64.b64encode(file["buffer"]).decode()],
    )


@contextlib.contextmanager
def busy_writer(service) -> Iterator[None]:
    """Keep the writer busy while the context is open."""
    release = block_writer(service)
    try:
        yield
    finally:
        release.set()


def focused(page, what: str = "id") -> str:
    return page.evaluate(f"document.activeElement.{what}")


def tab_to(page, selector: str) -> list[str]:
    """Press Tab until the element has the focus; return what had it on the way."""
    passed = []
    for _ in range(80):
        page.keyboard.press("Tab")
        passed.append(focused(page) or focused(page, "innerText"))
        if page.evaluate("wanted => document.activeElement.matches(wanted)", selector):
            return passed
    raise AssertionError(f"Tab never reaches {selector}, only {passed}")


def test_the_page_loads_nothing_from_elsewhere_and_writes_text_only() -> None:
    text = "".join(file.read_text() for file in STATIC.iterdir())
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert word not in text
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_page_has_no_inline_script_or_style() -> None:
    html, script = ((STATIC / name).read_text() for name in ("index.html", "app.js"))
    assert re.findall(r"<script[^>]*>", html) == ['<script src="app.js" defer>']
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert not re.search(r"setAttribute\(\"style|cssText", script)


def test_files_of_the_page_have_types_caching_and_a_strict_policy(folder) -> None:
    with open_service(folder, ServiceSettings.parse(QUICK)) as service:
        client = TestClient(build_app(service), "http://127.0.0.1", client=("127.0.0.1", 1))
        for path, kind in (("/", "html"), ("/app.css", "css"), ("/app.js", "javascript")):
            response = client.get(path)
            assert response.headers["content-type"] == f"text/{kind}; charset=utf-8"
            assert response.headers["cache-control"] == "no-cache"
            policy = response.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert "script-src 'self'; style-src 'self'; img-src" in policy
            assert policy.startswith("default-src 'none'")
            same = client.get(path, headers={"If-None-Match": response.headers["etag"]})
            assert (same.status_code, same.content) == (304, b"")


@in_a_browser
def test_inline_script_and_style_are_blocked(browser, served) -> None:
    """And reported in the console, where the other tests would see it."""
    url, _ = served()
    page, reports = browser.new_page(), []
    page.on("console", lambda message: reports.append(message.text))
    page.goto(url)
    page.evaluate("""() => {
      for (const [tag, text] of [["script", "window.ran = true"], ["style", "* { color: red }"]])
        document.body.append(Object.assign(document.createElement(tag), { textContent: text }));
    }""")
    expect(page.locator("tr.current")).to_be_visible()
    assert page.evaluate("window.ran") is None
    page.close()
    assert ["script-src 'self'" in text for text in reports] == [True, False]
    assert "style-src 'self'" in reports[1]


@in_a_browser
def test_the_interface_is_shown_without_scripts_of_others(served, visit) -> None:
    url, _ = served()
    page = visit(url)
    page.goto(url + "docs")
    expect(page.locator(".opblock-summary-path", has_text="/predict")).to_be_visible()
    page.locator("#operations-default-health_health_get").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table .response-col_status").last).to_have_text("200")


@in_a_browser
class TestPredict:
    def test_chosen_dropped_and_pasted_images_are_predicted(
        self, folder, served, scenario, visit
    ) -> None:
        known = Learner.load(folder).classes
        url, _ = served(adapt=False)
        page = visit(url)
        cards = page.locator("#predictions .card")
        page.set_input_files("#predict-files", files(scenario, count=3))
        expect(cards.locator(".bars")).to_have_count(3)
        assert set(cards.locator("h3").all_inner_texts()) <= set(known)
        assert cards.locator("small").all_inner_texts() == ["version 1"] * 3
        assert sorted(cards.first.locator(".bars li > :first-child").all_inner_texts()) == (
            sorted(known))  # fmt: skip
        expect(page.locator("#announcement")).to_contain_text("3 images: ")

        transfer = clipboard(page, files(scenario, count=1)[0])
        page.locator("#predict .drop").dispatch_event("drop", {"dataTransfer": transfer})
        expect(cards.locator(".bars")).to_have_count(4)
        page.evaluate(
            """transfer => document.body.dispatchEvent(
              new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true }))""",
            transfer,
        )
        expect(cards.locator(".bars")).to_have_count(5)
        page.get_by_role("button", name="Clear predictions").click()
        expect(cards).to_have_count(0)

    def test_a_score_below_the_threshold_is_unknown(self, served, scenario, visit) -> None:
        url, service = served()
        service.settings = service.settings.model_copy(update={"unknown_threshold": 2.0})
        page = visit(url)
        page.set_input_files("#predict-files", files(scenario, count=1))
        expect(page.locator("#predictions h3.unknown")).to_have_text("unknown")
        expect(page.locator("#predictions .bars li")).to_have_count(3)

    def test_a_sample_of_the_demo_is_predicted(self, served, visit) -> None:
        url, service = served(adapt=False)
        page = visit(url)
        samples = page.get_by_role("button", name="Predict a sample")
        expect(samples).to_have_count(2)  # the learner knows two of the demo's classes
        samples.first.click()
        expect(page.locator("#predictions .bars")).to_have_count(1)
        expect(page.locator("#predictions img")).to_have_attribute("alt", "orange plain arrow.png")
        for name in ("orange plain arrow", "blue striped heart"):
            service.rename(name, f"my {name}", "test")
        expect(page.locator("#samples")).to_be_hidden()

    def test_a_low_score_is_called_unsure(self, served, scenario, visit) -> None:
        url, _ = served(adapt=False)
        page = visit(url)
        top = [{"label": "fox", "score": 0.4}, {"label": "owl", "score": 0.35}]
        answer = {"label": "fox", "score": 0.4, "known": True, "top": top}
        page.route("**/predict?*", lambda route: route.fulfill(
            json={"version": 1, "predictions": [answer]}))  # fmt: skip
        page.set_input_files("#predict-files", files(scenario, count=1))
        expect(page.locator("#predictions h3.unknown")).to_have_text("unsure: fox?")

    def test_an_unreadable_image_has_its_error_on_its_card(self, served, scenario, visit) -> None:
        broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"not an image"}
        url, _ = served()
        page = visit(url, tolerated="400")
        page.set_input_files("#predict-files", [broken, *files(scenario, count=1)])
        expect(page.locator("#predictions .bars")).to_have_count(1)
        expect(page.locator("#predictions .error")).to_contain_text("'broken.png' is not an image")

    def test_a_request_to_a_busy_service_can_be_repeated(self, served, scenario, visit) -> None:
        url, service = served()
        page = visit(url, tolerated="429")
        service.reader.waiting = 10**9  # as if so many waited
        page.set_input_files("#predict-files", files(scenario, count=1))
        expect(page.locator("#predictions .error")).to_contain_text("busy, try again")
        service.reader.waiting = 0
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#predictions .bars")).to_have_count(1)

    def test_corrections_wait_and_are_learned(self, folder, served, scenario, visit) -> None:
        name = Learner.load(folder).classes[0]
        url, _ = served(adapt=False)
        page = visit(url)
        page.set_input_files("#predict-files", files(scenario, count=2))
        for n in (1, 2):
            page.get_by_role("button", name="Correct").first.click()
            page.get_by_label("True class").fill(name)
            page.keyboard.press("Enter")
            expect(page.get_by_text(f"Corrected: {name}.")).to_have_count(n)
            expect(page.locator("#corrections")).to_contain_text(f"{n} correction")
        page.get_by_role("button", name="Learn from them").click()
        expect(page.locator("#predict-jobs")).to_have_text(
            f"Learned {name} from 2 images: version 2 answers now.")  # fmt: skip
        expect(page.locator("#corrections")).to_be_hidden()
        expect(page.locator("tr.current")).to_contain_text(f"learned {name}")

    def test_corrections_can_be_discarded(self, folder, served, scenario, visit) -> None:
        url, service = served(adapt=False)
        page = visit(url, tolerated="400")  # an unknown class is asked about
        page.set_input_files("#predict-files", files(scenario, count=1))
        page.get_by_role("button", name="Correct").click()
        page.get_by_label("True class").fill("a slip")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Save as the new class “a slip”").click()
        page.get_by_role("button", name="Discard them").click()
        expect(page.locator("#corrections")).to_be_hidden()
        assert service.status()["corrections"] == 0


@in_a_browser
class TestLearn:
    def test_a_class_by_name_and_images(self, served, scenario, visit) -> None:
        name = "<i>fox</i>"  # text of users must not become markup
        url, _ = served(adapt=False)
        page = visit(url)
        expect(page.locator("#classes li")).to_have_count(3)
        learn = page.get_by_role("button", name="Learn the class", exact=True)
        learn.click()
        expect(page.locator("#one-class .error")).to_have_text("give the class a name")
        page.get_by_label("Class name").fill(name)
        learn.click()
        expect(page.locator("#one-class .error")).to_have_text("give at least one image")
        page.set_input_files("#class-files", files(scenario, 1, 3))
        page.set_input_files("#class-files", files(scenario, 1, 1))
        learn.click()
        expect(page.locator("#learn-jobs")).to_have_text(
            f"Learned {name} from 4 images: version 2 answers now.")  # fmt: skip
        expect(page.locator("#classes li")).to_have_count(4)
        expect(page.locator("#classes li").last).to_contain_text(name)
        expect(page.locator("#summary")).to_contain_text("version 2 · 4 classes")
        expect(page.locator("#one-class img")).to_have_count(0)

    def test_a_zip_of_classes_is_followed_by_another_page(self, served, scenario, visit) -> None:
        with io.BytesIO() as buffer:
            with zipfile.ZipFile(buffer, "w") as archive:
                for n, image in enumerate(files(scenario, 1, 8)):
                    archive.writestr(f"{'fox' if n % 2 else 'owl'}/{n}.png", image["buffer"])
            upload = {"name": "l.zip", "mimeType": "application/zip", "buffer": buffer.getvalue()}
        url, service = served(adapt=False)
        page, other = visit(url), visit(url)
        with busy_writer(service):
            page.set_input_files("#archive-file", upload)
            page.get_by_role("button", name="Learn the zip").click()
            for one in (page, other):
                expect(one.locator("#learn-jobs")).to_contain_text("Waiting to learn fox, owl")
                expect(one.get_by_role("progressbar", name="Session: fox, owl")).to_be_visible()
        for one in (page, other):
            expect(one.locator("#learn-jobs")).to_contain_text("Learned fox, owl")
            expect(one.locator("#classes li")).to_have_count(5)

    def test_a_session_can_be_cancelled(self, served, scenario, visit) -> None:
        url, service = served(adapt=False)
        page = visit(url)
        with busy_writer(service):
            page.get_by_label("Class name").fill("fox")
            page.set_input_files("#class-files", files(scenario, 1, 2))
            page.get_by_role("button", name="Learn the class", exact=True).click()
            page.locator("#learn-jobs").get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("button", name="Cancelling…")).to_be_visible()
        expect(page.locator("#learn-jobs .message")).to_have_text(
            "Cancelled: fox, nothing changed.")  # fmt: skip
        expect(page.locator("#classes li")).to_have_count(3)

    def test_a_refused_session_says_what_to_do_also_after_a_reload(
        self, served, scenario, visit
    ) -> None:
        url, service = served(adapt=False)
        service.writer.guard.check_session = lambda before, after: "train with a smaller lr"
        page = visit(url)

        def answer_late(route: Route) -> None:  # after the page has seen the job at /status
            answer = route.fetch()
            page.wait_for_timeout(1500)
            route.fulfill(response=answer)

        page.route("**/learn*", answer_late)
        page.get_by_label("Class name").fill("fox")
        page.set_input_files("#class-files", files(scenario, 1, 2))
        page.get_by_role("button", name="Learn the class", exact=True).click()
        told = "Refused: fox, not published: train with a smaller lr."
        expect(page.locator("#learn-jobs .message")).to_have_text(told)
        page.get_by_role("button", name="Fill in the form again").click()
        expect(page.get_by_label("Class name")).to_have_value("fox")
        expect(page.locator("#one-class img")).to_have_count(2)
        page.reload()
        expect(page.locator("#learn-jobs .message")).to_have_text(told)
        expect(page.locator("#session-options")).to_have_attribute("open", "")
        del service.writer.guard.check_session
        page.get_by_label("Learning rate").fill("1e-5")
        page.get_by_label("Epochs").fill("1")
        page.get_by_label("Class name").fill("fox")
        page.set_input_files("#class-files", files(scenario, 1, 2))
        with page.expect_request("**/learn?lr=1e-5&epochs=1"):
            page.get_by_role("button", name="Learn the class", exact=True).click()
        expect(page.locator("#learn-jobs")).to_contain_text("Learned fox from 2 images")
        page.reload()
        expect(page.locator("#classes li")).to_have_count(4)
        expect(page.locator("#learn-jobs .job")).to_have_count(0)

    def test_classes_are_renamed_and_removed(self, folder, served, visit) -> None:
        first, second, third = Learner.load(folder).classes
        url, _ = served(adapt=False)
        page = visit(url, tolerated="400")
        page.get_by_role("button", name=f"Rename {first}").click()
        field = page.get_by_label("New name")
        expect(field).to_be_focused()
        field.fill(second)
        page.keyboard.press("Enter")
        expect(page.locator("dialog .error")).to_contain_text(f"'{second}' exists already")
        field.fill("fox")
        page.keyboard.press("Enter")
        expect(page.locator("#classes li > span").first).to_have_text("fox")
        page.get_by_role("button", name=f"Remove {third}").click()
        page.locator("dialog").get_by_role("button", name="Remove").click()
        expect(page.locator("#classes li > span")).to_have_text(["fox", second])


@in_a_browser
class TestMonitor:
    def test_the_stream_is_shown(self, served, scenario, visit) -> None:
        test = scenario.tasks[0].test
        pixels = to_bytes(test.read(range(len(test))))
        canary = Canary.from_images(pixels, [scenario.tasks[0].classes[n] for n in test.labels])
        url, service = served(canary=canary, canary_drop=100.0)
        page = visit(url)
        expect(page.locator("#histogram")).to_have_text("Nothing yet.")
        page.set_input_files("#predict-files", files(scenario))
        tile = page.locator("#tiles > div")
        expect(tile.filter(has_text="predicted").locator("dd")).to_have_text("8")
        expect(tile.filter(has_text="adapted to").locator("dd")).to_have_text("8")
        expect(page.locator("tr.current")).to_contain_text("1 step on the stream")
        page.set_input_files("#predict-files", files(scenario))
        expect(page.get_by_role("img", name="canary accuracy, versions 2 to 3")).to_be_visible()
        for name in ("images per second", "confidence", "disagreement"):
            assert page.get_by_role("img", name=name).locator("path").count() >= 2
        counted = service.status()["signals"]["histogram"]
        expect(page.locator("#histogram li")).to_have_text([f"{n}{c}" for n, c in counted.items()])
        page.get_by_text("adapt to these images").uncheck()
        page.set_input_files("#predict-files", files(scenario, count=2))
        expect(tile.filter(has_text="predicted").locator("dd")).to_have_text("18")
        assert service.writer.waiting == 0

    def test_a_hidden_page_sends_no_requests(self, served, visit) -> None:
        url, _ = served()
        page = visit(url, clock=True)
        expect(page.locator("tr.current")).to_be_visible()
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        hide = """hidden => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
        page.evaluate(hide, True)
        page.clock.run_for(10_000)
        assert requests == []
        with page.expect_response("**/status"):
            page.evaluate(hide, False)
        with page.expect_response("**/status"):
            page.clock.run_for(5_000)

    def test_trouble_is_shown_until_it_is_over(self, served, visit) -> None:
        url, _ = served()
        page = visit(url, tolerated="500")
        expect(page.locator("tr.current")).to_be_visible()
        page.route("**/status", lambda route: route.fulfill(
            status=500, body="oh", content_type="text/plain"))  # fmt: skip
        expect(page.locator("#trouble")).to_have_text("the service answered 500")
        page.unroute("**/status")
        expect(page.locator("#trouble")).to_be_empty()


@in_a_browser
class TestVersions:
    def test_rollback(self, served, visit) -> None:
        url, service = served(adapt=False)
        service.rename(service.classes[0], "fox", "test")
        page = visit(url)
        rows = page.locator("#version-rows tr")
        expect(rows).to_have_count(2)
        back = page.get_by_role("button", name="Roll back to version 1")
        back.click()
        page.locator("dialog").get_by_role("button", name="Cancel").click()
        expect(page.locator("dialog")).to_have_count(0)
        assert service.version == 2
        back.click()
        expect(page.locator("dialog")).to_contain_text("“trained for the tests”, with 3 classes")
        page.locator("dialog").get_by_role("button", name="Roll back").click()
        expect(rows).to_have_count(3)
        expect(page.locator("tr.current")).to_contain_text("rolled back to version 1")
        expect(page.locator("#classes li").filter(has_text="fox")).to_have_count(0)
        expect(back).to_be_focused()

    def test_freeze_and_unfreeze(self, served, visit) -> None:
        url, service = served()
        page = visit(url)
        page.get_by_role("button", name="Freeze").click()
        page.locator("dialog").get_by_role("button", name="Freeze").click()
        expect(page.locator("#frozen")).to_contain_text("Frozen: by localhost.")
        assert service.status()["frozen"]
        page.get_by_role("button", name="Unfreeze").click()
        page.locator("dialog").get_by_role("button", name="Unfreeze").click()
        expect(page.locator("#frozen")).to_be_empty()
        expect(page.locator("#freeze")).to_have_text("Freeze")
        assert not service.status()["frozen"]


@in_a_browser
class TestAccess:
    def test_a_token_is_requested_and_kept_in_the_tab(self, folder, served, visit) -> None:
        token = Tokens(folder).add("me", "teach")
        url, _ = served(token=True)
        page = visit(url, tolerated="401")
        expect(page.get_by_label("Token", exact=True)).to_be_focused()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Enter a token").click()
        page.get_by_label("Token", exact=True).fill("a wrong one")
        page.keyboard.press("Enter")
        expect(page.locator("dialog")).to_contain_text("The last token was not accepted.")
        page.get_by_label("Token", exact=True).fill(token)
        page.keyboard.press("Enter")
        expect(page.locator("#classes li")).to_have_count(3)
        page.reload()
        expect(page.locator("#classes li")).to_have_count(3)
        expect(page.locator("dialog")).to_have_count(0)
        assert page.evaluate("localStorage.length") == 0
        page.get_by_role("button", name="Forget the token").click()
        expect(page.get_by_role("button", name="Enter a token")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0

    def test_the_printed_address_signs_in_and_leaves_no_token_in_the_history(
        self, folder, served, visit
    ) -> None:
        token = Tokens(folder).add("owner", "teach")
        url, _ = served(token=True)
        page = visit(f"{url}#token={token}")
        expect(page.locator("#classes li")).to_have_count(3)
        assert page.url == url
        page.reload()
        expect(page.locator("#classes li")).to_have_count(3)
        assert page.evaluate("localStorage.length") == 0

    def test_a_missing_role_is_shown_in_the_dialog(self, folder, served, visit) -> None:
        token = Tokens(folder).add("guest", "predict")
        url, _ = served(token=True)
        page = visit(url, tolerated="40")  # 401, then 403
        page.get_by_label("Token", exact=True).fill(token)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Freeze").click()
        page.locator("dialog").get_by_role("button", name="Freeze").click()
        expect(page.locator("dialog .error")).to_have_text("the token of 'guest' may not teach")

    def test_a_replica_shows_no_controls_for_changes(self, served, scenario, visit) -> None:
        url, _ = served(follow=True)
        page = visit(url)
        expect(page.locator("#learn")).to_contain_text("This replica only reads")
        page.set_input_files("#predict-files", files(scenario, count=1))
        expect(page.locator("#predictions .bars")).to_have_count(1)
        for name in ("Learn", "Rename", "Remove", "Roll back", "Freeze", "Correct"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)


@in_a_browser
class TestAccessibility:
    def test_every_control_works_with_the_keyboard(self, served, scenario, visit) -> None:
        url, service = served()
        service.rename(service.classes[0], "fox", "test")
        page = visit(url)
        page.on("filechooser", lambda chooser: chooser.set_files(files(scenario, count=1)))
        expect(page.locator("tr.current")).to_be_visible()
        passed = tab_to(page, "#version-rows button")
        wanted = """Learn predict-files adapt-to-images class-name class-files Learn the class
                    archive-file Learn the zip Rename Remove freeze Roll back"""
        found = [name for name in dict.fromkeys(passed) if name and name in wanted]
        assert " ".join(found) == " ".join(wanted.split())

        for n, key in enumerate(("Enter", "Space")):
            page.locator("#predict-files").focus()
            page.keyboard.press(key)
            expect(page.locator("#predictions .bars")).to_have_count(n + 1)

        page.locator("#archive .primary").focus()
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
    def test_a_narrow_screen_needs_no_horizontal_scrolling(
        self, served, scenario, visit, scheme
    ) -> None:
        url, service = served(adapt=False)
        service.rename(service.classes[0], "fox" * 60, "test")
        page = visit(url, 360, color_scheme=scheme, reduced_motion="reduce")
        page.set_input_files("#predict-files", files(scenario, count=4))
        expect(page.locator("#predictions .bars")).to_have_count(4)
        page.get_by_role("button", name="Correct").first.click()
        expect(page.locator("tr.current")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.get_by_role("button", name="Roll back").click()
        box = page.locator("dialog").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
