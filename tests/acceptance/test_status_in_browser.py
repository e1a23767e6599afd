"""The status page in a real browser: Chromium, headless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browsers import Tab, open_browser
from phonograph.engine.process.health import Health
from statuses import Busy, app, serving

CONTRAST = """() => {
  const linear = (share) => (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
  const channel = (value) => linear(value / 255);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest("noscript")) continue;
    const style = getComputedStyle(node);
    const [one, other] = [light(parse(node instanceof SVGElement ? style.fill : style.color)), light(behind(node))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) poor.push(`${node.className} ${node.textContent}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    made = Tab(browser)
    yield made
    made.context.close()


@pytest.fixture
def busy() -> Busy:
    made = Busy()
    made.run(120)
    return made


def test_it_shows_what_the_server_says_and_follows(tab: Tab, busy: Busy) -> None:
    busy.warn("<b>the engine core</b> runs again")
    with serving(app(busy)) as url:
        tab.page.goto(url)
        tab.until("#state", "ready")
        assert tab.text("#model") == "SmolLM2-135M-Instruct"
        assert "bfloat16" in tab.text("#facts")
        assert tab.text("#tile-output strong").replace(",", "").isdigit()
        assert tab.text("#tile-gap strong").endswith(" ms")
        assert tab.page.locator("#tile-gap path.series").count() == 2
        assert "L" in tab.page.get_attribute("#tile-gap path.series-0", "d"), "history from before the page was opened"
        assert tab.text("#incidents .text") == "<b>the engine core</b> runs again", "data is text, never markup"
        before = tab.text("#totals")
        busy.run(3)
        busy.health = Health("down", "the engine core was ended by SIGKILL")
        tab.until("#state", "down")
        assert tab.text("#notice") == "the engine core was ended by SIGKILL"
        assert tab.text("#totals") != before
        assert tab.problems == []


def test_a_server_that_has_done_nothing_has_a_page_too(tab: Tab) -> None:
    empty = Busy(facts=None)
    empty.health = Health("starting")
    with serving(app(empty)) as url:
        tab.page.goto(url)
        tab.until("#state", "starting")
        empty.keeper.tick()
        tab.page.wait_for_timeout(1300)
        assert tab.text("#tile-first .more") == "nothing in the last minute"
        assert tab.problems == []


def test_phases_show_reasons_and_buckets(tab: Tab, busy: Busy) -> None:
    with serving(app(busy)) as url:
        tab.page.goto(url)
        tab.until(".phase", "decode")
        prefill = tab.page.locator(".phase").nth(1)
        reasons = prefill.locator(".reasons tbody tr")
        assert reasons.nth(0).inner_text().split("\t") == [
            "capture failed",
            "40",
            "the capture of prefill[tokens=4] failed",
        ]
        assert "reads the device from the host" in prefill.locator(".failures").inner_text()
        few = prefill.locator(".buckets tbody tr").count()
        prefill.get_by_role("button", name="Show all 30 buckets").click()
        assert (few, prefill.locator(".buckets tbody tr").count()) == (9, 30)
        prefill.get_by_role("button", name="Show fewer").click()
        assert prefill.locator(".buckets tbody tr").count() == few
        assert tab.problems == []


def test_pointing_at_a_plot_reads_it(tab: Tab, busy: Busy) -> None:
    with serving(app(busy)) as url:
        tab.page.goto(url)
        tab.until("#state", "ready")
        box = tab.page.locator("#tile-output svg").bounding_box()
        tab.page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 20)
        assert "/s" in tab.text("#tile-output figcaption .key-0")
        assert ":" in tab.text("#tile-output figcaption .when")
        assert "highest" in tab.page.get_attribute("#tile-output svg", "aria-label")


def test_a_key_is_asked_for_and_kept_in_the_tab(tab: Tab, busy: Busy) -> None:
    with serving(app(busy, locked=True)) as url:
        tab.page.goto(url)
        tab.page.get_by_label("API key").fill("wrong")
        tab.page.get_by_role("button", name="Show status").click()
        tab.until("#ask-problem", "did not accept")
        assert not tab.page.is_visible("#main")
        tab.page.get_by_label("API key").fill("secret")
        tab.page.keyboard.press("Enter")
        tab.until("#state", "ready")
        tab.page.reload()
        tab.until("#state", "ready")
        assert tab.page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
        assert all("401" in problem for problem in tab.problems), "the browser itself notes a refused request"


def test_a_server_that_is_gone_is_told_and_taken_up_again(tab: Tab, busy: Busy) -> None:
    with serving(app(busy)) as url:
        tab.page.goto(url)
        tab.until("#state", "ready")
        tab.page.route("**/status.json*", lambda route: route.abort())
        tab.until("#state", "not reachable")
        assert "No answer from the server" in tab.text("#notice")
        tab.page.unroute("**/status.json*")
        tab.until("#state", "ready")
        assert not tab.page.is_visible("#notice")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_can_be_read(browser: Any, busy: Busy, width: int, scheme: str) -> None:
    tab = Tab(browser, width, scheme)
    busy.warn("a" * 300)
    with serving(app(busy)) as url:
        tab.page.goto(url)
        tab.until("#state", "ready")
        tab.page.wait_for_timeout(200)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.evaluate(CONTRAST) == []
        assert tab.page.screenshot(full_page=True)
        assert tab.problems == []
    tab.context.close()
