"""The page in a real browser without a screen: what a visitor presses, and what is then on the page."""

import re
import shutil
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

pytest.importorskip("gradio", reason="gradio is not installed: pip install 'hf-drafthead[page]'")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

from hf_drafthead.page.app import build, launch  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")

QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
TEMPLATE = "{{ bos_token }}{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
PROMPT = "def read_json(path):\n"
SECONDS = 60_000  # milliseconds that anything may take on a busy machine


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(hydra) -> Iterator[str]:
    """A page with a switch for chats, since its tokenizer has a template."""
    model, tokenizer = hydra
    before, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    blocks = build(model, tokenizer, max_new_tokens=32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield launch(blocks, host="127.0.0.1", port=port, block=False)
    blocks.close()
    tokenizer.chat_template = before


@pytest.fixture
def page(browser, address) -> Iterator:
    """The page as it is opened; afterwards, nothing was fetched from elsewhere and nothing failed in the browser."""
    page = browser.new_page()
    page.set_default_timeout(SECONDS)
    elsewhere: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url) if outside(request.url) else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#prompt textarea")
    yield page
    page.close()
    assert elsewhere == [] and errors == []


def outside(url: str) -> bool:
    return urlsplit(url).hostname not in (None, "127.0.0.1")


def generate(page, prompt: str) -> None:
    """Press the button and wait until all is written."""
    page.get_by_label("A question").uncheck()
    page.fill("#prompt textarea", prompt)
    page.click("#generate")
    page.wait_for_selector("#verdict :text('Speedup')")


def shown(page, side: str) -> str:
    """What a side wrote, as the page's own elements hold it."""
    return page.eval_on_selector(f"#{side} .textfield", "element => element.textContent").replace(" ", "")


def test_guesses_have_colours_and_both_sides_write_the_text_of_the_base(page, hydra):
    model, tokenizer = hydra
    generate(page, PROMPT)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    text = tokenizer.decode(model.base.generate(ids, max_new_tokens=32, do_sample=False)[0], skip_special_tokens=True)
    assert shown(page, "heads") == shown(page, "base") == text.replace(" ", "").replace("\n", "")
    assert page.locator("#heads .highlighted").count() > 0 and page.locator("#base .highlighted").count() == 0
    assert re.search(r"Speedup \d+\.\d\d\. Heads and base wrote the same text\.", page.inner_text("#verdict"))


@pytest.mark.slow
def test_text_appears_while_it_is_written_and_stop_ends_it(page, hydra):
    page.fill("#length input[type=number]", "400")
    page.press("#length input[type=number]", "Enter")
    page.get_by_label("A question").uncheck()
    page.fill("#prompt textarea", PROMPT)
    page.click("#generate")
    page.wait_for_selector("#heads .highlighted", state="attached")
    page.click("#stop")
    page.fill("#length input[type=number]", "8")
    page.press("#length input[type=number]", "Enter")
    generate(page, PROMPT)  # which begins only once the other has ended
    assert "400" not in page.inner_text("#figures")


@pytest.mark.slow
def test_a_question_is_answered(page, hydra):
    page.fill("#prompt textarea", "x = 1")
    page.click("#generate")
    page.wait_for_selector("#verdict :text('Speedup')")
    assert "x = 1" not in shown(page, "heads")[:5]


def test_bad_input_is_told_in_one_line(page):
    page.fill("#prompt textarea", "  ")
    page.click("#generate")
    page.wait_for_selector("text=the prompt is empty: write the text that the model shall continue.")
