"""The page in a real browser without a screen: what a visitor presses, and what is then on the page."""

import re
import shutil
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import torch

pytest.importorskip("gradio", reason="gradio is not installed: pip install 'hf-drafthead[page]'")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

from hf_drafthead.page.app import build, launch  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")

QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
TEMPLATE = "{{ bos_token }}{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
PROMPT = "def read_json(path):\n"
WATCH = """() => {
    const button = document.querySelector("#generate");
    window.wasDisabled = false;
    new MutationObserver(() => { window.wasDisabled ||= button.disabled; }).observe(button, {attributes: true});
}"""  # the button is disabled while the page writes
SECONDS = 60_000  # milliseconds that anything may take on a busy machine


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(hydra) -> Iterator[str]:
    """A page with a chat, since its tokenizer has a template."""
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


def generate(page, prompt: str, mode: str = "Continue a text") -> None:
    """Press the button and wait until all is written."""
    page.get_by_label(mode).check()
    page.fill("#prompt textarea", prompt)
    page.evaluate(WATCH)
    page.click("#generate")
    page.wait_for_function("() => window.wasDisabled && !document.querySelector('#generate').disabled")


def set_number(page, name: str, value: float) -> None:
    page.fill(f"#{name} input[type=number]", str(value))
    page.press(f"#{name} input[type=number]", "Enter")


def text_of(model, tokenizer, prompt: str, **settings) -> str:
    given = tokenizer(prompt, return_tensors="pt")
    ids = {name: given[name] for name in ("input_ids", "attention_mask")}
    out = model.base.generate(**ids, max_new_tokens=32, **settings)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def shown(page, side: str) -> str:
    """What a side wrote, as the page's own elements hold it."""
    return page.eval_on_selector(f"#{side}-text .dh-text", "element => element.textContent")


def figure(page, side: str, name: str) -> float:
    cells = page.locator(f"#{side}-figures td").all_inner_texts()
    (found,) = [cell.split("\n")[0] for cell in cells if cell.split("\n")[1] == name]
    return float(found)


def test_both_sides_write_the_text_of_the_base_and_guesses_have_colours(page, hydra):
    generate(page, PROMPT)
    expected = PROMPT + text_of(*hydra, PROMPT, do_sample=False)
    assert shown(page, "heads") == shown(page, "base") == expected
    assert page.locator("#heads-text .dh-1").count() > 0 and page.locator("#heads-text .dh-2").count() > 0
    assert page.locator("#base-text .dh-1").count() == 0
    colour = "element => getComputedStyle(element).backgroundColor"
    colours = {page.eval_on_selector(f"#heads-text .dh-{depth}", colour) for depth in (1, 2)}
    assert len(colours) == 2 and "rgba(0, 0, 0, 0)" not in colours
    assert re.search(r"Speedup \d+\.\d\d\. Heads and base wrote the same text\.", page.inner_text("#verdict"))


@pytest.mark.slow
def test_figures_are_those_of_generate(page, hydra):
    model, tokenizer = hydra
    generate(page, PROMPT)
    given = tokenizer(PROMPT, return_tensors="pt")
    ids = {name: given[name] for name in ("input_ids", "attention_mask")}
    out = model.generate(**ids, max_new_tokens=32, do_sample=False, return_dict_in_generate=True)
    assert figure(page, "heads", "tokens per step") == round(out.accepted_lengths.float().mean().item(), 2)
    assert figure(page, "heads", "forward passes") == out.accepted_lengths.shape[1]
    assert figure(page, "base", "forward passes") == 31
    assert figure(page, "heads", "tokens per second") > 0


@pytest.mark.slow
def test_the_tree_can_be_looked_at_step_by_step(page):
    generate(page, PROMPT)
    steps = int(figure(page, "heads", "forward passes"))
    assert page.inner_text("#walked").startswith(f"Step {steps} of {steps}: 47 guesses")
    assert page.locator("#tree svg g").count() == 48
    set_number(page, "step", 1)
    page.wait_for_selector(f"#walked :text('Step 1 of {steps}:')")
    accepted = int(re.search(r"(\d+) accepted", page.inner_text("#walked"))[1])
    assert page.locator("#tree svg path.walked").count() == accepted


@pytest.mark.slow
def test_text_appears_while_it_is_written_and_stop_ends_it(page):
    set_number(page, "length", 400)
    page.get_by_label("Continue a text").check()
    page.fill("#prompt textarea", PROMPT)
    page.click("#generate")
    page.wait_for_selector("#heads-text .dh-1", state="attached")
    page.click("#stop")
    page.wait_for_selector("#step input[type=range]:enabled")
    assert 0 < figure(page, "heads", "tokens") < 400
    assert page.inner_text("#verdict").strip() == ""


@pytest.mark.slow
def test_settings_reach_generate(page, hydra):
    page.click("#tree-choice input")
    page.fill("#tree-choice input", "[[0], [1], [0, 0]]")
    page.press("#tree-choice input", "Enter")
    set_number(page, "temperature", 1)
    set_number(page, "seed", 3)
    generate(page, PROMPT)
    torch.manual_seed(3)
    expected = PROMPT + text_of(*hydra, PROMPT, do_sample=True, temperature=1.0)
    assert shown(page, "heads") == shown(page, "base") == expected
    assert "3 guesses" in page.inner_text("#walked")
    page.get_by_label("typical").check()
    generate(page, PROMPT)
    assert "different texts" in page.inner_text("#verdict")


@pytest.mark.slow
def test_the_base_need_not_run(page):
    page.get_by_label("Run the base too").uncheck()
    generate(page, PROMPT)
    assert figure(page, "heads", "tokens") == 32
    assert page.inner_text("#base-text").strip() == ""


@pytest.mark.slow
def test_a_chat_goes_on_with_its_own_answers(page, hydra):
    generate(page, "x = 1", "Chat")
    first = text_of(*hydra, "# user\nx = 1\n", do_sample=False)
    assert shown(page, "heads") == "x = 1" + first
    assert page.input_value("#prompt textarea") == ""
    generate(page, "y = 2", "Chat")
    asked = f"# user\nx = 1\n# assistant\n{first}\n# user\ny = 2\n"
    assert shown(page, "heads") == f"x = 1{first}y = 2" + text_of(*hydra, asked, do_sample=False)
    page.click("#clear")
    page.wait_for_selector("#heads-text .dh-text", state="detached")
    generate(page, "x = 1", "Chat")
    assert shown(page, "heads") == "x = 1" + first


def test_bad_input_is_told_in_one_line(page):
    page.get_by_label("Continue a text").check()
    page.fill("#prompt textarea", "  ")
    page.click("#generate")
    page.wait_for_selector("text=the prompt is empty: write the text that the model shall continue.")
    page.wait_for_selector("#generate:enabled")
