"""A real Chromium, and tabs in which nothing may go wrong unnoticed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Locator, Page, Request, sync_playwright

_REFUSED = re.compile(r"Failed to load resource: the server responded with a status of (\d+)")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium without a window; it ends with the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched_tab(browser: Browser, url: str, *, refusals: frozenset[int] = frozenset()) -> Iterator[Page]:
    """A tab of its own session. Errors of scripts, of the content security policy and of loading, and dialogs, fail at
    the end of the block; answers with a status in `refusals` are expected.
    """
    with browser.new_context(base_url=url) as context:
        page = context.new_page()
        wrong: list[str] = []

        def said(kind: str, text: str) -> None:
            refused = _REFUSED.match(text)
            if kind == "error" and not (refused and int(refused[1]) in refusals):
                wrong.append(text)

        def failed(request: Request) -> None:
            # Whoever goes on before a page has loaded aborts the rest of it.
            if "ERR_ABORTED" not in (request.failure or ""):
                wrong.append(f"{request.url}: {request.failure}")

        page.on("console", lambda message: said(message.type, message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("requestfailed", failed)
        page.on("dialog", lambda dialog: wrong.append("a script of a name ran"))
        yield page
        assert not wrong, wrong


def follow(link: Locator) -> None:
    """Click what leads to another page, and return when that page has loaded."""
    with link.page.expect_navigation():
        link.click()
