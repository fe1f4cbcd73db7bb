"""The pages of `dta_jax.inspect` and `dta_jax.report` in a real browser: `python -m pytest tests/browser`.

Needs playwright (`pip install playwright`) and a Chromium on the PATH, such as Debian's package `chromium`.
"""

import json
import shutil

import numpy as np
import pytest
from playwright.sync_api import Page, sync_playwright

from dta_jax import inspect, report
from dta_jax.inspect_page import inspection_page, operations_of_rows
from dta_jax.inspection import Inspection, Subject, inspect_samples
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.types import Samples

NAMES = ("chromium", "chromium-browser", "google-chrome")
MOST_BYTES = 5_000_000
MOST_BLOCKS = 20_000  # drawn at a time, however large the trie is


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path, f"none of {', '.join(NAMES)} is on the PATH"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def found() -> Inspection:
    spec = SyntheticRollouts(vocab_size=64, tasks=4, trials=3, system_tokens=60, completion_tokens=12)
    return inspect_samples(inspect.subject_of(generate_rollouts(spec), "made.npz"), chunk_size=16)


@pytest.fixture
def page(browser, found, tmp_path) -> Page:
    return opened(browser, tmp_path, inspection_page(found))


def opened(browser, folder, text: str) -> Page:
    """A page from a file; whatever it asks for or complains of fails the test."""
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page.set_default_timeout(120_000)
    page.on("pageerror", lambda error: pytest.fail(f"error in the page: {error}"))
    page.on("console", lambda message: message.type == "error" and pytest.fail(message.text))
    page.on("request", lambda request: request.url.startswith("file:") or pytest.fail(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]", state="attached")
    assert page.get_attribute("body", "data-ready") == "yes"
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page


def at_trie(page: Page, across: float, down: float) -> tuple[float, float]:
    canvas = page.locator("#trie")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def colours(page: Page, canvas: str) -> int:
    """How many different colours a canvas shows."""
    return page.evaluate(
        """id => {
          const canvas = document.getElementById(id);
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(new Uint32Array(pixels.buffer)).size;
        }""",
        canvas,
    )


def test_both_canvases_are_drawn(page):
    assert colours(page, "trie") > 5
    assert colours(page, "timeline") > 5


def test_hovering_says_what_a_block_is(page, found):
    page.mouse.move(*at_trie(page, 0.05, 0.5))
    page.wait_for_function("document.getElementById('facts').textContent.startsWith('Tokens 0 to')")
    said = page.inner_text("#facts")
    sequences = len(found.lengths)
    assert f"{sequences} sequences pass, of 12 rollouts and 4 tasks" in said
    assert f"{(sequences - 1) * found.runs.length[0]:,} tokens saved" in said
    page.mouse.click(*at_trie(page, 0.05, 0.5))  # keeps it, and shows all of the run
    shown = [int(token) for token in page.inner_text("#text").split() if token.isdigit()]
    assert shown == found.trie.token[: found.runs.length[0]].tolist()


def test_every_block_is_found_where_it_is_drawn(page):
    missed = page.evaluate(
        """() => {
          const { trie, data } = window.inspection, missed = [];
          for (let i = 0; i < data.runLength.length; i++) {
            const x = trie.view.pixelX(data.runDepth[i] + data.runLength[i] / 2);
            const found = trie.at(x, trie.view.pixelY(trie.top[i] + 0.5));
            const inside = found && found.row >= trie.start[i] && found.row < trie.start[i + 1];
            if (!inside || found.run !== i) missed.push(i);
          }
          return missed;
        }"""
    )
    assert missed == []


def test_tokens_with_loss_are_marked(page, found):
    rows = page.evaluate(
        """() => {
          const { trie, data } = window.inspection, rows = [];
          for (let i = 0; i < data.runLength.length; i++)
            for (let row = trie.start[i]; row < trie.start[i + 1]; row++)
              if (trie.hasLoss(row, i)) rows.push(row);
          return rows;
        }"""
    )
    assert rows == np.unique(found.schedule.entry_row).tolist()


def test_zoom_drag_and_reset(page):
    def view():
        return page.evaluate("(({x0, x1, y0, y1}) => [x0, x1, y0, y1])(window.inspection.trie.view)")

    whole = view()
    x, y = at_trie(page, 0.7, 0.3)
    page.mouse.click(x, y)
    page.mouse.wheel(0, -300)
    page.wait_for_function(
        f"window.inspection.trie.view.x1 - window.inspection.trie.view.x0 < {whole[1]} * 0.9"
    )
    zoomed = view()
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 80, y - 40, steps=4)
    page.mouse.up()
    moved = view()
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    page.keyboard.press("Escape")
    assert view() == whole
    page.mouse.dblclick(*at_trie(page, 0.05, 0.5))
    assert view()[2:] == whole[2:]  # the root's subtree is everything
    page.click("#closer")
    assert view() != whole
    page.click("#whole")
    assert view() == whole


def test_every_moment_of_the_schedule_is_coloured_as_the_stack_is(page, found):
    schedule = found.schedule
    backward, pushed = operations_of_rows(schedule)
    for moment in (0, schedule.num_ops // 2, schedule.num_ops - 1):
        page.evaluate(
            """o => {
              const slider = document.getElementById("moment");
              slider.value = o;
              slider.dispatchEvent(new Event("input"));
            }""",
            moment,
        )
        assert page.inner_text("#operation").startswith(f"Operation {moment + 1} of {schedule.num_ops}: ")
        states = page.evaluate(
            """() => {
              const { trie, data } = window.inspection, names = {};
              for (const [name, colour] of Object.entries(STATES)) names[colour] = name;
              return Array.from(data.pieceStart, (_, p) => names[trie.pieceColour(p)]);
            }"""
        )
        pieces = page.evaluate("Array.from(window.inspection.data.pieceStart)")
        back, push = backward[pieces], pushed[pieces]
        want = np.where(back < moment, "done", np.where(back == moment, "running", "waiting"))
        want = np.where((back > moment) & (push >= 0) & (push < moment), "stack", want)
        want = np.where((back > moment) & (push == moment), "pushing", want)
        assert states == want.tolist()
    assert page.is_checked("input[value=schedule]")


def test_playing_goes_through_the_schedule(page):
    page.click("#play")
    page.wait_for_function("window.inspection.state.moment > 3")
    page.click("#play")
    assert page.inner_text("#play") == "Play"


def test_a_hundred_thousand_runs_are_small_and_drawn_in_few_blocks(browser, tmp_path):
    rng = np.random.default_rng(0)
    groups, leaves = 500, 100
    head = np.arange(8, dtype=np.int32)
    openings = rng.integers(0, 5000, (groups, 6)).astype(np.int32)
    ends = rng.integers(0, 5000, (groups, leaves, 2, 4)).astype(np.int32)
    sequences = []
    for opening, own in zip(openings, ends, strict=True):
        for first, second in own:
            sequences += [
                np.concatenate([head, opening, first]),
                np.concatenate([head, opening, first, second]),
            ]
    count = len(sequences)
    position = np.array([len(s) - 1 for s in sequences], np.int32)
    samples = Samples(sequences, np.arange(count, dtype=np.int32), position)
    subject = Subject("large", samples, np.arange(count) // 2, np.arange(count) % 2)
    found = inspect_samples(subject, chunk_size=4096)
    assert len(found.runs.start) >= 100_000
    text = inspection_page(found)
    assert len(text) < MOST_BYTES
    page = opened(browser, tmp_path, text)
    drawn, milliseconds = page.evaluate(
        """() => {
          const { trie } = window.inspection, [width, height] = trie.drawing.size, began = performance.now();
          trie.draw(trie.drawing.canvas.getContext("2d"), width, height);
          return [trie.drawn, performance.now() - began];
        }"""
    )
    print(f"{len(found.runs.start):,} runs, {len(text):,} bytes: {drawn:,} blocks in {milliseconds:.0f} ms")
    assert 0 < drawn < MOST_BLOCKS


def test_reports_say_what_is_under_the_pointer(browser, tmp_path):
    rows = [{"step": s, "loss": 1 / s, "reward_mean": s / 40, "seconds": 1.0} for s in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.write_report([report.read_run(tmp_path)], tmp_path / "out")
    page = opened(browser, tmp_path, (tmp_path / "out" / "index.html").read_text())
    box = page.locator(".chart svg").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_selector("#tip", state="visible")
    step = int(page.inner_text("#tip b").split()[1])
    value = float(page.inner_text("#tip div").split(": ")[1])
    assert value == pytest.approx(step / 40, rel=1e-3)
