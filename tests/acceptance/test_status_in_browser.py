"""The status page in a real browser: Chromium, headless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from browsers import Tab, open_browser
from phonograph.engine.process.health import Health
from phonograph.engine.process.statistics import EagerStats, PhaseStats
from statuses import Busy, app, serving, stats

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


def test_speculation_has_a_card(tab: Tab, busy: Busy) -> None:
    with serving(app(busy)) as url:
        tab.page.goto(url)
        tab.until("#speculation .badge", "eagle")
        assert tab.text("#speculation .phase-head .more").startswith("3 drafts a round; rounds run where that pays (")
        assert tab.text("#speculation .figure").split() == ["2.76", "tokens", "a", "round"]
        assert tab.text("#speculation .legend").split("\n") == ["18,000 rounds (78.9 %)", "4,800 plain (21.1 %)"]
        assert tab.text("#speculation .times-of-passes").split("   ") == ["round 4.14 ms", "plain step 2.89 ms"]
        places = [row.split("\t") for row in tab.page.locator("#speculation .places tbody tr").all_inner_texts()]
        assert [(place, told.strip()) for place, *_, told in places] == [
            ("1", "82.0 %"),
            ("2", "59.2 %"),
            ("3", "37.5 %"),
        ]
        reasons = tab.page.locator("#speculation .reasons tbody tr")
        assert reasons.nth(0).inner_text().split("\t") == ["cost", "84,000", "rounds would not have paid"]
        assert [row.split("\t")[0] for row in reasons.all_inner_texts()] == ["cost", "grammar", "request"]
        assert tab.problems == []


def test_speculation_before_its_first_round_and_none(tab: Tab) -> None:
    fresh = Busy()
    fresh.metrics.take(stats(0), incarnation=0)
    with serving(app(fresh)) as url:
        tab.page.goto(url)
        tab.until("#speculation", "tokens a round")
        assert "NaN" not in tab.text("#speculation")
        assert "None." in tab.text("#speculation")
        fresh.metrics.take(stats(1, speculation=None), incarnation=0)
        tab.page.locator("#speculation").wait_for(state="hidden", timeout=10_000)
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


BURST = """async () => {
  const { linearTop, logRange } = await import("/page/plot.js");
  const calm = Array(595).fill(10);
  return [linearTop([...calm, 9000]), linearTop([...calm, 30]), linearTop([0, 0, 5]), linearTop([]), linearTop([null]),
    logRange([0.02, 0.03, 14]), logRange([0.05]), logRange([null, 0]), logRange([0.1, 1])];
}"""


def test_axes_survive_a_burst(tab: Tab, busy: Busy) -> None:
    for _ in range(60):
        busy.metrics.first_token(40.0)
    more = {"prompt_tokens": 10_000_000, "generated_tokens": 20_000_000}
    busy.metrics.take(stats(busy.second + 1, **more), incarnation=0)
    busy.now += 1
    busy.keeper.tick()
    with serving(app(busy)) as url:
        tab.page.goto(url)
        tab.until("#state", "ready")
        assert tab.page.evaluate(BURST) == [15, 30, 5, 1, 1, [0.01, 100], [0.01, 0.1], [0.1, 1], [0.1, 1]]
        assert tab.page.locator("#tile-output .beyond").count() == 2, "what is above the axis is marked"
        assert tab.page.locator("#tile-output .beyond title").first.text_content().startswith("up to ")
        assert tab.page.locator("#tile-first .beyond").count() == 0, "times have a logarithmic axis"
        assert "100.0 s" in tab.page.locator("#tile-first .grid").text_content()
        assert tab.problems == []


def test_repeated_incidents_are_one_with_a_count(tab: Tab, busy: Busy) -> None:
    for number in range(30):
        busy.warn(f"request {number} was given up")
    with serving(app(busy)) as url:
        tab.page.goto(url)
        tab.until("#incidents", "request 29 was given up")
        assert tab.page.locator("#incidents li").count() == 1
        assert tab.text("#incidents .times") == "× 30"


def test_a_cpu_that_records_nothing_is_no_alarm(tab: Tab) -> None:
    calm = Busy()
    found = stats(50)
    off = PhaseStats("decode", "disabled", "seqs", (), (EagerStats("disabled", 900, "graphs are off on a CPU"),), {})
    calm.metrics.take(msgspec.structs.replace(found, phases=(off,)), incarnation=0)
    with serving(app(calm)) as url:
        tab.page.goto(url)
        tab.until(".phase", "decode")
        assert tab.text(".phase .legend") == "900 steps, all eager: nothing is recorded here"
        assert tab.page.locator(".phase .part.eager, .phase .gaps li, .phase .failed").count() == 0


def test_a_request_has_a_page(tab: Tab, busy: Busy) -> None:
    busy.request("chatcmpl-<b>odd</b>", ends=False)
    with serving(app(busy, locked=True)) as url:
        tab.page.goto(url)
        tab.page.get_by_label("API key").fill("secret")
        tab.page.keyboard.press("Enter")
        tab.until("#latest tbody tr:first-child", "active")
        tab.page.locator("#latest a").nth(1).click()
        tab.until("#state", "stop")
        assert tab.text("#name").startswith("chatcmpl-0")
        assert tab.page.locator("#choices article").count() == 1
        assert "queued 410 ms" in tab.text("#choices .legend")
        rows = tab.page.locator("#choices .passes tbody tr")
        assert rows.nth(1).inner_text().split("\t") == [
            "prompt: prefill",
            "",
            "1",
            "capture failed: the capture of prefill[tokens=4] failed",
        ]
        tab.page.goto(f"{url}/requests/{quote('chatcmpl-<b>odd</b>')}")
        tab.until("#state", "active")
        assert tab.text("#name") == "chatcmpl-<b>odd</b>", "data is text, never markup"
        busy.request("chatcmpl-<b>odd</b>")
        tab.until("#state", "stop")
        tab.page.goto(f"{url}/requests/nobody")
        tab.until("#state", "not kept")
        assert "none is called so" in tab.text("#notice")
        assert all("40" in problem for problem in tab.problems), "the browser itself notes what is refused"


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
        tab.page.locator("#latest a").first.click()
        tab.until("#state", "stop")
        tab.page.wait_for_timeout(200)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.evaluate(CONTRAST) == []
        assert tab.problems == []
    tab.context.close()
