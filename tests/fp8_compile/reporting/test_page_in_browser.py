"""The page in a real Chromium: it loads from disk and asks for nothing, and everything on it can be used.

Needs Debian's chromium and chromium-driver, or the like, and the selenium package; skipped where they are missing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from made_up_dump import write_dump

from fp8_compile.reporting.report_page import refresh

webdriver = pytest.importorskip("selenium.webdriver", reason="the selenium package drives the browser: it is missing")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium"),
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver: apt-get install chromium-driver"),
]

HOSTILE = '</script><script>document.title="taken"</script><img src=x onerror=document.title="taken">'
MODULES = ["blocks.0.up", "blocks.0.down", "lm_head", HOSTILE, "数学.\u202eweg", "long." + "x" * 3000]
FIRST_PAINT_SECONDS = 2.0
LAYERS_OF_5000_NODES = 1000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium.common.exceptions import SessionNotCreatedException

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,1000", "--disable-dev-shm-usage")
    # Its own calls home are no business of the page: without them every request in the log is the page's.
    quiet = ("--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync")
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*flags, *quiet, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        try:
            driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        except SessionNotCreatedException:  # a machine so busy that Chromium took more than a minute: once more
            driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        yield driver
        driver.quit()


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return refresh(write_dump(tmp_path_factory.mktemp("dump") / "graph_000", MODULES, passes=40))


def load(browser: Any, page: Path) -> Callable[..., Any]:
    """Open the page from disk, wait until it is painted; returns what runs JavaScript in it."""
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(page.as_uri())
    wait(lambda: browser.execute_script("return document.documentElement.dataset.painted") == "yes")
    return browser.execute_script


def wait(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "the page never got there"
        time.sleep(0.02)
    return found


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    own = ("data:", "chrome:", "chrome-untrusted:")  # the latter two are the browser's
    return [one["request"]["url"] for one in sent if not one["request"]["url"].startswith(own)]


def texts(run: Callable[..., Any], selector: str) -> list[str]:
    return run("return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector)


def pick(run: Callable[..., Any], id: str, value: str) -> None:
    run("const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.onchange?.()", id, value)
    run("document.getElementById(arguments[0]).dispatchEvent(new Event('change'))", id)


def painted(run: Callable[..., Any], side: int, colour: tuple[int, int, int]) -> int:
    """How many pixels of a side of the graph have a colour."""
    return run(
        """
        const [side, ...colour] = arguments, canvas = panes[side].canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let found = 0;
        for (let i = 0; i < data.length; i += 4) found += colour.every((part, j) => data[i + j] === part);
        return found;
        """,
        side,
        *colour,
    )


def test_it_loads_from_disk_alone_and_hostile_names_are_text(browser: Any, small_page: Path) -> None:
    run = load(browser, small_page)
    assert requests(browser) == [small_page.as_uri()]
    assert complaints(browser) == []
    assert run("return document.title") == "graph_000: 4 of 6 matmuls in FP8"
    assert run("return document.images.length") == 0 and run("return document.scripts.length") == 2
    assert texts(run, ".body .row .where")[:4] == MODULES[:4]
    assert run("return document.documentElement.scrollWidth <= window.innerWidth")  # a long name stays in its place
    big = texts(run, ".card .big")
    assert big[0] == "4 of 6" and big[1] == "3.00 kB"
    assert "1.00 kB saved" in texts(run, "#summary")[0] and "excluded by '<img" in texts(run, ".reasons")[0]


def test_tensors_with_a_scale_per_block_have_a_chart_of_blocks_at_its_ends(
    browser: Any, small_page: Path, tmp_path: Path
) -> None:
    run = load(browser, small_page)
    assert "ends" not in run("return Object.keys(METRICS)")
    assert not any("blocks" in one for one in texts(run, "#charts figcaption"))
    run = load(browser, refresh(write_dump(tmp_path / "graph_000", MODULES, passes=40, blocks=True)))
    assert "blocks at the scale's ends" in texts(run, "#heat-metric option")
    pick(run, "heat-metric", "ends")
    assert run("return heat.slots.slice(0, 2)") == [2, 1], "after the Inf comes the tensor that has some"
    run("choose({ slot: 1 })")
    titles = texts(run, "#charts figcaption")
    assert [one for one in titles if one.startswith("blocks at the scale's ends, %")] and len(titles) == 5
    assert titles[-1].startswith("SQNR, dB") and complaints(browser) == []


def test_the_table_filters_and_sorts_with_mouse_and_keyboard(browser: Any, small_page: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    run = load(browser, small_page)
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys("/")
    field = browser.switch_to.active_element
    assert field.get_attribute("id") == "filter-text"
    field.send_keys("blocks DOWN 64x64x64")
    assert texts(run, ".body .row .where") == ["blocks.0.down"]
    assert texts(run, "#filter-count") == ["1 of 6 gemms"]
    field.send_keys(Keys.CONTROL + "a", Keys.DELETE)
    browser.find_element(By.CSS_SELECTOR, ".part.skipped").click()
    assert texts(run, ".body .row .where") == ["lm_head", MODULES[5][:159] + "…"]
    pick(run, "filter-decision", "")
    head = browser.find_element(By.CSS_SELECTOR, ".row.head button")
    head.click()
    assert texts(run, ".body .row .where")[1] == "blocks.0.down"
    head.click()
    assert run("return document.querySelector('[aria-sort=descending]').textContent") == "module"
    assert texts(run, ".body .row .where")[0] == MODULES[4]
    browser.find_element(By.ID, "table-scroll").send_keys(Keys.HOME, Keys.ARROW_DOWN)
    assert run("return document.querySelector('.row.chosen').getAttribute('aria-rowindex')") == "2"
    assert complaints(browser) == []


def test_a_gemm_chosen_in_the_graph_is_chosen_on_both_sides_with_its_details(browser: Any, small_page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    run = load(browser, small_page)
    left, right = browser.find_elements(By.CSS_SELECTOR, ".pane canvas")
    left.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert texts(run, "#details h3") == ["blocks.0.down"] and texts(run, ".row.chosen .where") == ["blocks.0.down"]
    details = texts(run, "#details dd")
    assert "m.py:1 y" in details and "64 × 64 × 64" in details and "e4m3 × e4m3" in details
    assert any("fp8_e4m3 [64, 64]" in text and "→ bf16 [64, 64]" in text for text in details)
    assert any("blocks.0.down#0.weight" in text and "scale 448, amax 1.4" in text for text in details)
    # Both panes have brought it into view: what lies in the middle of the right one belongs to it.
    middle = """
      const pane = panes[1], { width, height } = pane.size();
      return pane.stage.site[pane.nodeAt((width + GUTTER - STRIP) / 2, height / 2)];
    """
    assert wait(lambda: run(middle)) == "mm_1"
    # A click on the first node of another gemm, found where it is drawn.
    run("panes[1].reveal('mm_3')")
    spot = run("const s = panes[1].size(); return [(GUTTER - STRIP) / 2, 0]")
    ActionChains(browser).move_to_element_with_offset(right, int(spot[0]), int(spot[1])).click().perform()
    assert texts(run, "#details h3") == [HOSTILE]
    counts = "return panes.map((pane) => pane.stage.site.filter((site) => site === CHOSEN.row.node).length)"
    assert run(counts) == [1, 3]
    accent = (0x3B, 0x5B, 0xDB)  # frames what is chosen
    assert all(wait(lambda side=side: painted(run, side, accent)) > 100 for side in (0, 1))
    assert complaints(browser) == []


def test_the_heat_strip_puts_the_tensors_in_trouble_first_and_charts_the_chosen_one(
    browser: Any, small_page: Path
) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    run = load(browser, small_page)
    assert run("return heat.slots.slice(0, 2)") == [2, 1]  # an Inf is worse than saturation
    assert texts(run, "#charts h3") == ["blocks.0.down#0.input"] and len(texts(run, "#charts svg")) == 4
    assert run("return document.querySelectorAll('#charts line.broken').length") == 1
    browser.find_element(By.ID, "heat").send_keys(Keys.ARROW_DOWN)
    assert texts(run, "#charts h3") == ["blocks.0.up#0.weight"]
    path = run("return document.querySelectorAll('#charts .line.c4')[0].getAttribute('d')")
    heights = {float(point.split()[1]) for point in path.replace("M", "L").split("L")[1:]}
    assert len(path.split("L")) == 40 and len(heights) == 2  # saturated in half of the passes
    # With another metric the order changes: all flush alike, so the broken one leads and the rest are as in the model.
    pick(run, "heat-metric", "underflow")
    assert run("return heat.slots.slice(0, 3)") == [2, 0, 1]
    assert complaints(browser) == []


def test_the_page_is_dark_where_the_reader_wants_it_so(browser: Any, small_page: Path) -> None:
    light_and_dark = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        run = load(browser, small_page)
        light_and_dark.append(run("return [getComputedStyle(document.body).backgroundColor, theme().kinds.other.fill]"))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert light_and_dark == [["rgb(244, 245, 248)", "#ffffff"], ["rgb(15, 19, 27)", "#1d2431"]]


def test_a_graph_of_5000_nodes_is_painted_within_two_seconds_and_scrolls(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    modules = [f"model.layers.{index // 7}.part_{index % 7}" for index in range(LAYERS_OF_5000_NODES)]
    page = refresh(write_dump(tmp_path / "graph_000", modules, per_gemm=3, passes=60))
    run = load(browser, page)
    assert all(count >= 5000 for count in run("return STAGES.map((stage) => stage.count)"))
    seconds = run("return performance.getEntriesByName('fp8:painted')[0].startTime") / 1000
    if seconds > FIRST_PAINT_SECONDS:  # a busy machine: the page has a second chance, a slow page fails it, too
        run = load(browser, page)
        seconds = run("return performance.getEntriesByName('fp8:painted')[0].startTime") / 1000
    assert seconds < FIRST_PAINT_SECONDS
    assert len(texts(run, ".body .row")) < 60  # of a thousand
    browser.find_element(By.CSS_SELECTOR, ".pane canvas").send_keys(Keys.ARROW_DOWN * 3, Keys.END)
    browser.find_element(By.ID, "table-scroll").send_keys(Keys.END)
    assert texts(run, "#details h3") == [modules[-1]]
    overlap = """
      const {rows, x} = panes[1].layout;
      const tooNear = (node, i, row) => i > 0 && x[node] - x[row[i - 1]] < NODE.width;
      return rows.some((row) => [...row].sort((a, b) => x[a] - x[b]).some(tooNear));
    """
    assert run(overlap) is False
    assert complaints(browser) == []
