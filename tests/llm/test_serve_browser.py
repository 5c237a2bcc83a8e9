"""The page in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(240)]

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
PICTURES = os.environ.get("HOSTRING_TEST_PICTURES", "")  # a folder for pictures of the page, for people to look at
WAIT_MS = 60_000
SIZES = {"light": (1200, 800), "dark": (1200, 800), "phone": (390, 844)}


@pytest.fixture
def server() -> Iterator[Running]:
    model = os.environ.get("HOSTRING_TEST_GGUF")
    args = ("--dtypes", "f32") if model is None else (model, "--context", "1024")
    found = Running("serve", *args, "--local", "3", "--port", "0")
    try:
        found.wait_for(lambda out, err: out.endswith("\n") or found.process.poll() is not None)
        yield found
    finally:
        found.stop()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"needs {CHROMIUM}")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch_persistent_context(
            str(tmp_path / "profile"), executable_path=CHROMIUM, args=list(FLAGS), headless=True
        )
        found.set_default_timeout(WAIT_MS)
        yield found
        found.close()


@pytest.fixture
def page(server: Running, browser: Any) -> Iterator[Any]:
    """The chat. Fails at the end when the page had an error, or asked another host."""
    url = server.out.decode().removeprefix("listening on ").strip()
    page, errors, hosts = browser.new_page(), [], set()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(re.sub(r"(https?://[^/]+).*", r"\1", request.url)))
    page.goto(url)
    yield page
    assert not errors
    assert hosts == {url}


def picture(page: Any, name: str) -> None:
    """In each size and colour, where somebody wants to look at it."""
    if PICTURES:
        for kind, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme="dark" if kind == "dark" else "light")
            page.wait_for_timeout(1200)  # the cluster is drawn every second
            page.screenshot(path=str(Path(PICTURES, f"{name}-{kind}.png")))
        page.set_viewport_size({"width": 1200, "height": 800})


def ask(page: Any, text: str, tokens: str) -> None:
    if not page.locator("#max_tokens").is_visible():
        page.locator("#settings summary").click()
    page.fill("#max_tokens", tokens)
    page.locator("#settings summary").click()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_until(page: Any, what: Callable[[], bool]) -> None:
    """As `page.wait_for_function`, which the page's content security policy forbids."""
    until = time.monotonic() + WAIT_MS / 1000
    while not what():
        assert time.monotonic() < until
        page.wait_for_timeout(100)


def last_answer(page: Any) -> str:
    return str(page.locator(".message.assistant .text").last.inner_text())


def test_a_chat_in_a_browser(page: Any) -> None:
    """An answer comes, another is stopped, and made again; the conversation is there after the page is loaded anew."""
    ask(page, "Name three colours.", "24")
    page.wait_for_selector("text=/24 tokens|[0-9]+ tokens/")
    first = last_answer(page)
    assert first
    picture(page, "chat")
    ask(page, "Tell me a very long story.", "300")
    wait_until(page, lambda: page.locator(".message.assistant").count() == 2 and len(last_answer(page)) > 20)
    picture(page, "writing")
    page.click("#stop")
    page.wait_for_selector("text=stopped")
    stopped = last_answer(page)
    assert stopped
    page.wait_for_timeout(500)
    assert last_answer(page) == stopped, "text comes after a stop"
    page.locator(".message.assistant button", has_text="Again").last.click()
    page.wait_for_selector("#stop:visible")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    page.reload()
    assert page.locator(".message").count() == 4
    assert page.locator(".message.assistant .text").first.inner_text() == first
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_killed_rank_is_red_until_it_is_back(page: Any, server: Running) -> None:
    page.click("#show-cluster")
    page.wait_for_selector("#dot.good")
    wait_until(page, lambda: page.locator(".rank").count() == 3)
    picture(page, "cluster")
    os.kill(server.rank(2), signal.SIGSTOP)  # it can't be back before somebody has looked
    os.kill(server.rank(2), signal.SIGKILL)
    page.wait_for_selector("#dot.bad")
    page.wait_for_selector("#picture .node.lost")
    colour = "getComputedStyle(document.querySelector('#picture .node.lost')).stroke"
    assert page.evaluate(colour) == page.evaluate("getComputedStyle(document.querySelector('#state.bad')).color"), (
        "a lost rank is not red"
    )
    assert "rank 2 is lost" in page.locator("#state").inner_text()
    picture(page, "lost")
    page.wait_for_selector("#dot.good")
    wait_until(page, lambda: page.locator("#picture .node.lost").count() == 0)
    assert "again" in page.locator("#events li").first.inner_text()
