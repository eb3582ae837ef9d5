"""The page: nothing outside of it, nothing in it that a submission could run, and tables that a real browser sorts."""

from __future__ import annotations

import html.parser
import re

import pytest
from browser import CHROMIUM, DRIVER, browser
from test_scoreboard import result

from flashcli.judge import page as pages
from flashcli.judge import scoreboard

NAMES = ["alice", "<img src=x onerror=document.title=1>", "carol", '"><script>document.title=1</script>', "erin"]
SECONDS = {"alice": (9.0, 0.5), "carol": (10.0, 0.25), "erin": (100.0, None)}


@pytest.fixture
def page(tmp_path):
    results = [
        result(name, case, seconds, detail="</td><script>document.title=1</script>")
        for name in NAMES
        for case, seconds in zip(("a", "b"), SECONDS.get(name, (20.0, 30.0)), strict=True)
    ]
    results.append(result("alice", "a", 1.0, device="Another <GPU>"))
    path = tmp_path / "board.html"
    path.write_text(pages.html(scoreboard.boards(results, "passed")), encoding="utf-8")
    return path


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attributes) -> None:
        self.found.append((tag, dict(attributes)))


def test_it_is_self_contained_and_escaped(page):
    text = page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    names = [tag for tag, _ in tags.found]
    assert names.count("script") == 1 and not {"img", "link", "iframe", "object"} & set(names)
    attributes = {name for _, given in tags.found for name in given}
    assert not {"src", "href"} & attributes and not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?:", text)
    assert NAMES[1] in {given.get("data-of") for _, given in tags.found}


def test_a_mark_for_each_accepted_result_at_its_time(page):
    text = page.read_text(encoding="utf-8")
    marks = re.findall(r'class="mark" data-of="(\w+)" x="([\d.]+)%"[^>]*><title>\w+: ([\d.]+) s', text)
    first = {(name, float(seconds)): float(x) for name, x, seconds in marks}
    assert (
        first["carol", 0.25] < first["alice", 0.5] < first["alice", 9.0] < first["carol", 10.0] < first["erin", 100.0]
    )
    assert '✗ 1<tspan class="more"> failed' in text and "erin: wrong answer" in text


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium with chromedriver to look at the page with (apt-get install chromium-driver)")
    with browser(tmp_path_factory.mktemp("home")) as session:
        yield session


@pytest.fixture
def opened(page, chromium):
    chromium.open(page)
    return chromium


def column(session, table: int, number: int) -> list[str]:
    script = f"return [...document.querySelectorAll('table')[{table}].tBodies[0].rows]"
    return session.run(f"{script}.map(row => row.cells[{number}].textContent)")


def heading(table: int, text: str) -> str:
    return f"(//table)[{table + 1}]//th/button[.={text!r}]"


def test_a_browser_sorts_by_number_and_by_name(opened):
    opened.click(heading(0, "time"))
    times = [float(text.removesuffix(" s")) for text in column(opened, 0, 3)]
    assert times == sorted(times) == [9.5, 10.25, 50.0, 50.0, 100.0], "not as text, by which 10 comes before 9"
    opened.click(heading(0, "time"))
    assert column(opened, 0, 1)[0] == "erin"
    sort = "return document.querySelectorAll('th')[3].getAttribute('aria-sort')"
    assert opened.run(sort) == "descending"
    opened.click(heading(0, "submission"))
    assert opened.run(sort) is None
    names = column(opened, 0, 1)
    assert [name for name in names if name.isalpha()] == ["alice", "carol", "erin"]
    assert column(opened, 2, 1) == ["alice"], "the other device's table is another"


def test_no_script_of_a_submission_runs_and_nothing_is_asked_for(opened):
    assert opened.run("return document.title") == "Scoreboard"
    assert opened.complaints() == []
    assert opened.run("return performance.getEntriesByType('resource').length") == 0


def test_the_policy_stops_a_script_even_if_one_got_in(page, chromium):
    """Escaping is one lock; this is the other."""
    page.write_text(page.read_text().replace("<h1>", "<script>document.title = 1</script><img src=x><h1>"))
    chromium.open(page)
    assert chromium.run("return document.title") == "Scoreboard"
    assert any("Content Security Policy" in complaint for complaint in chromium.complaints())


def test_what_has_no_time_comes_last_whichever_way_it_is_sorted(chromium, tmp_path):
    results = [result("none", "a", None)._replace(seconds=None), result("x", "a", 1.0), result("y", "a", 2.0)]
    path = tmp_path / "board.html"
    path.write_text(pages.html(scoreboard.boards(results, "passed")), encoding="utf-8")
    chromium.open(path)
    chromium.click(heading(0, "time"))
    assert column(chromium, 0, 1) == ["x", "y", "none"]
    chromium.click(heading(0, "time"))
    assert column(chromium, 0, 1) == ["y", "x", "none"]


EDGES = """return [...document.querySelector('table.results').rows].map(row => [...row.cells].map(cell => {
    const inside = document.createRange(); inside.selectNodeContents(cell.querySelector('button') ?? cell);
    const box = inside.getBoundingClientRect();
    return cell.className === 'n' ? box.right : box.left; }).slice(0, 6))"""


@pytest.mark.parametrize("width", [1200, 600])
def test_results_stand_below_their_headings_and_within_the_page(opened, width):
    """Letters of the plot are as large on a narrow page as on a wide one."""
    opened.resize(width, 900)
    heads, *rows = opened.run(EDGES)
    assert rows and all(row == pytest.approx(heads, abs=1) for row in rows)
    assert max(map(max, rows)) < width
    boxes = "[...document.querySelectorAll('.plot text')].map(text => text.getBoundingClientRect())"
    placed = opened.run(f"return {boxes}.map(box => [box.left, box.right, box.height])")
    assert all(0 <= left < right <= width and height >= 12 for left, right, height in placed), "all can be read"


def test_on_a_narrow_page_a_detail_is_as_wide_as_the_page(opened):
    width = "return document.querySelector('.results .detail').getBoundingClientRect().width"
    scrolls = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
    wide = opened.run(width)
    opened.resize(600, 900)
    assert opened.run("return window.innerWidth") <= 600
    assert opened.run(width) > 500 > wide and not opened.run(scrolls)
