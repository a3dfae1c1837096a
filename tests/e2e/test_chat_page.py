"""The chat page in a real browser: it streams, stops, and asks nobody but its own server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.chromium import CHROMIUM, open_browser
from tests.serve_support import run_toy_server
from tests.toy_engine import expected_text

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

LAST = "[...document.querySelectorAll('.assistant')].at(-1)?.textContent ?? ''"


def say(text: str) -> str:
    return f"document.getElementById('text').value = {text!r}; document.getElementById('send').click(); true"


def test_it_streams_stops_and_goes_on(tmp_path: Path) -> None:
    with run_toy_server("toy:delay=0.02") as server, open_browser(tmp_path) as page:
        page.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        page.wait_until("document.getElementById('model')?.textContent === '· toy'")
        page.evaluate(
            "document.getElementById('tokens').value = 60; document.getElementById('temperature').value = 0; true"
        )

        page.evaluate(say("<img src=x onerror=alert(1)> hi"))
        first = page.wait_until(LAST)
        want = expected_text("User: <img src=x onerror=alert(1)> hi\nAssistant:", 60).removeprefix(" ")
        assert want.startswith(first) and len(first) < len(want), "text is there before all of it is"
        page.wait_until("document.getElementById('stop').disabled")
        assert page.evaluate(LAST) == want
        assert "60 tokens" in page.evaluate("document.querySelector('.note').textContent")
        assert page.evaluate("document.querySelectorAll('img').length") == 0, "text is not read as HTML"

        page.evaluate("document.getElementById('tokens').value = 1500; true")
        page.evaluate(say("long"))
        page.wait_until("document.querySelectorAll('.assistant').length === 2 && "
                  "document.querySelectorAll('.assistant')[1].textContent.length > 5")  # fmt: skip
        page.evaluate("document.getElementById('stop').click(); true")
        server.wait_idle(3.0)
        page.wait_until("document.body.innerText.includes('stopped')")
        assert server.engines[0].used == 0 and server.engines[0].generated < 800

        page.evaluate("document.getElementById('tokens').value = 5; true")
        page.evaluate(say("again"))
        page.wait_until(
            "document.querySelectorAll('.assistant').length === 3 && document.getElementById('stop').disabled"
        )

        page.evaluate("document.getElementById('tokens').value = 1500; true")
        page.evaluate(say("of another conversation"))
        page.wait_until(f"({LAST}).length > 5 && !document.getElementById('stop').disabled")
        page.evaluate("document.getElementById('new').click(); true")
        page.wait_until("document.getElementById('stop').disabled")
        page.evaluate("document.getElementById('tokens').value = 20; true")
        page.evaluate(say("fresh"))
        page.wait_until(f"({LAST}).length > 2 && document.getElementById('stop').disabled")
        assert page.evaluate(LAST) == expected_text("User: fresh\nAssistant:", 20).removeprefix(" ")
        assert "stopped" not in page.evaluate("document.body.innerText"), "of what is no longer shown"

        urls = [e["params"]["request"]["url"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
        own = (f"http://127.0.0.1:{server.port}/", "data:,", "about:blank")
        assert len(urls) > 3 and all(url.startswith(own) for url in urls), urls
        faults = [
            event
            for event in page.events
            if event.get("method") == "Runtime.exceptionThrown"
            or (event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error")
        ]
        assert not faults, faults


def test_it_asks_for_a_key_and_shows_errors(tmp_path: Path) -> None:
    with run_toy_server("toy", api_keys=("a-secret-key",)) as server, open_browser(tmp_path) as page:
        page.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        page.wait_until("document.querySelector('.error')?.textContent.includes('API key')")
        page.wait_until("!document.getElementById('keybox').hidden")
        page.evaluate("document.getElementById('key').value = 'a-secret-key'; "
                 "document.getElementById('key').dispatchEvent(new Event('change')); true")  # fmt: skip
        page.wait_until("document.getElementById('model').textContent === '· toy'")
        page.evaluate("document.getElementById('tokens').value = 10 ** 6; true")
        page.evaluate(say("too much"))
        page.wait_until("[...document.querySelectorAll('.error')].some(e => e.textContent.includes('ask for at most'))")
        assert page.evaluate("document.querySelectorAll('.assistant').length") == 0
