"""The page in a real browser: what a reader clicks, types and points at, and what then is there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

import regard
from helpers.browser import Page, browser
from helpers.command import serving, until
from regard.decoding.settings import Settings

CAT = "The cat sat on the mat."
VIEWS = ("translate", "summarize", "answer", "complete", "look", "explain")
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 23, 29)"  # the paper of pictures


pytestmark = [pytest.mark.browser, pytest.mark.processes]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(opened: Page, served: str) -> Iterator[Page]:
    """The browser, which must not find anything wrong, nor ask anybody else."""
    opened.site = served
    opened.errors.clear()
    opened.asked.clear()
    opened.look_as(width=1200)
    yield opened
    assert opened.errors == []
    elsewhere = [url for url in opened.asked if not url.startswith((served, "data:", "blob:"))]
    assert set(elsewhere) <= {"about:blank"}


def of(view: str, rest: str) -> str:
    return f"[data-view={view}] {rest}"


def ask(page: Page, view: str, **fields: object) -> None:
    """Open the address of a request, or of a view without one."""
    page.open(f"{page.site}/#{view}" + (f"?{urlencode(fields)}" if fields else ""))


def submit(page: Page, view: str) -> None:
    page.click(of(view, "form button"))
    done(page, view)


def done(page: Page, view: str) -> None:
    page.wait(
        f"document.querySelector('{of(view, '.result')}').firstChild && "
        f"!document.querySelector('[data-view={view}][aria-busy]')"
    )


def result(page: Page, view: str, **fields: object) -> None:
    ask(page, view, **fields)
    done(page, view)


def refusal(page: Page, view: str, **fields: object) -> str:
    """The message that a request is answered with."""
    ask(page, view, **fields)
    page.wait("document.querySelector('[role=alert]')")
    page.errors.clear()  # the browser notes the status
    return page.text("[role=alert]")


def test_a_translation_and_where_its_words_were_read(page: Page) -> None:
    ask(page, "")
    assert page.text("h1") == "regard"
    page.wait("document.querySelector('[data-view=translate] [name=to]').value === 'fr'")
    page.type(of("translate", "textarea"), CAT)
    submit(page, "translate")
    record = regard.translate(CAT, "fr")
    target, source = (page.texts(of("translate", f".pane:nth-child({n}) .unit")) for n in (1, 2))
    assert target == list(record.attended.queries)
    assert source == list(record.attended.keys)
    assert page.text(of("translate", ".text")) == record.text
    shown = page.texts(of("translate", ".map tbody td"))
    weights = [weight for row in record.attended.weights for weight in row]
    assert [float(text if text != "." else 0) for text in shown] == pytest.approx(weights, abs=0.01)
    # The mouse lights what a word was read from; so do the arrow keys, and from the other side.
    words = of("translate", ".pane:nth-child(1) .unit")
    page.point(words, target.index("chat"))
    assert page.texts(of("translate", ".lit")) == ["cat"]
    attended = page.text(of("translate", ".attended"))
    weight = record.attended.weights[target.index("chat")][source.index("cat")]
    assert " ".join(attended.split()).startswith(f"chat attended to cat {weight:.2f}")
    page.point("h1")
    assert page.texts(of("translate", ".lit")) == []
    page.click(words, target.index("chat"))
    for _ in range(target.index("assit") - target.index("chat")):
        page.press("ArrowRight")
    assert page.text(of("translate", ".attended")).startswith("assit attended to")
    assert "sat" in page.texts(of("translate", ".lit"))
    page.point(of("translate", ".pane:nth-child(2) .unit"), source.index("cat"))
    assert page.text(of("translate", ".attended")).startswith("cat was attended to by")
    # A link to it shows it again, and the way back leads to what was there before.
    page.open(page.says("location.href"))
    done(page, "translate")
    assert page.text(of("translate", ".text")) == record.text
    assert page.says("document.querySelector('[data-view=translate] textarea').value") == CAT


def test_a_doubtful_result_says_why(page: Page) -> None:
    result(page, "translate", text="Привет!", to="fr")
    expected = "Low confidence 0.40: a text in another script was copied, not translated."
    assert page.text(of("translate", "[role=note]")) == expected
    result(page, "translate", text=CAT, to="fr")
    assert page.texts(of("translate", "[role=note]")) == []
    assert "confidence 0." in page.text(of("translate", ".facts"))


def test_a_picture_and_a_request_to_take_along(page: Page, tmp_path: Path) -> None:
    said = {"text": "It's a cat.", "to": "fr"}
    result(page, "translate", **said)
    page.save_into(tmp_path)
    page.click("a[download]")
    saved = tmp_path / "translate.svg"
    until(saved.is_file)
    expected = regard.translate("It's a cat.", "fr").attended.picture("Alignment").svg()
    # The server is another process, which may round otherwise.
    number = re.compile(r"\d+\.\d+(?:e-\d+)?")
    found = saved.read_text(encoding="utf-8")
    assert number.split(found) == number.split(expected)
    numbers = [[float(each) for each in number.findall(text)] for text in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)
    page.click(of("translate", "summary"))
    line = shlex.split(page.text(of("translate", "pre")))
    assert line[:3] == ["curl", "-s", "--json"]
    assert json.loads(line[3]) == said | {"model": "translate"}
    assert line[4] == f"{page.site}/translate"


def test_what_is_written_is_never_markup(page: Page) -> None:
    nasty = "<img src=x onerror=\"document.title='gone'\"> <script>document.title='gone'</script>"
    asked = {
        "translate": {"text": nasty, "to": "fr"},
        "answer": {"question": nasty, "context": f"{nasty} The cat slept."},
        "complete": {"text": nasty, "max_new_tokens": 3, "temperature": 0, "seed": 0},
        "look": {"text": nasty, "model": "books-gpt2", "layer": 0, "head": 0},
        "explain": {"sentence": nasty},
    }
    for view, said in asked.items():
        result(page, view, **said)
        assert page.says("document.querySelectorAll('main img, main script').length") == 0
        assert "gone" not in page.says("document.title")
    assert "<img" in refusal(page, "translate", text="a", to=nasty)


def test_a_summary_and_its_sentences(page: Page) -> None:
    ask(page, "summarize")
    submit(page, "summarize")
    assert len(page.texts(of("summarize", ".pane:nth-child(1) .unit"))) == 3
    page.point(of("summarize", ".unit"))
    assert page.texts(of("summarize", ".lit"))[0].startswith("This library lets Python")
    result(page, "summarize", model="summarize")
    assert len(page.texts(of("summarize", ".pane:nth-child(2) .unit"))) == 3
    things = (
        "🐈 Things:\n- milk\n- two loaves of bread\n- eggs"  # the markers are no part of sentences
    )
    result(page, "summarize", text=things)
    assert page.text(of("summarize", ".pane:nth-child(1) .text")) == things
    units = page.texts(of("summarize", ".pane:nth-child(1) .unit"))
    assert units == ["🐈 Things:", "milk", "two loaves of bread", "eggs"]
    result(page, "summarize", text=CAT)  # a single sentence attends to no other
    assert page.texts(of("summarize", ".text")) == [CAT, CAT]


def test_an_answer_is_marked_in_its_context(page: Page) -> None:
    context = "🐈🐈 The cat sat on the mat while the dog slept in the garden."
    result(page, "answer", question="Where did the dog sleep?", context=context)
    assert page.text(of("answer", ".answer")) == "in the garden"
    assert page.text(of("answer", "mark")) == "in the garden"
    result(page, "answer", question="Who wrote it?", context=context)
    assert page.text(of("answer", ".text")) == "No answer in this context."
    assert page.texts(of("answer", "mark")) == []


def test_a_completion_grows_and_its_words_look_back(page: Page) -> None:
    ask(page, "complete")
    page.says(
        "window.sizes = new Set(); new MutationObserver(() => window.sizes.add("
        "document.querySelector('.caret')?.textContent.length)).observe("
        "document.querySelector('[data-view=complete] .result'), {childList: true, subtree: true})"
    )
    page.type(of("complete", "textarea"), "Once upon a time")
    page.type(of("complete", "[name=max_new_tokens]"), "12")
    page.press("Enter")
    done(page, "complete")
    assert page.says("window.sizes.size") > 6
    how = Settings(seed=1)
    record = regard.complete("Once upon a time", max_new_tokens=12, how=how)
    assert page.text(of("complete", ".text")) == str(record)
    page.point(of("complete", ".unit[tabindex]"), 1)
    assert page.texts(of("complete", ".lit"))
    assert page.text(of("complete", ".attended")).startswith(record.attended.queries[1])


def test_it_can_be_stopped(page: Page) -> None:
    ask(page, "complete", text="Once", model="books-xl", max_new_tokens=1000, temperature=1, seed=0)
    page.wait("document.querySelector('.caret')?.textContent.length > 20")
    page.click(of("complete", ".busy button"))
    page.wait("!document.querySelector('.busy') && !document.querySelector('.caret')")
    idle = "fetch('/health').then((r) => r.json()).then((found) => found.waiting === 0)"
    page.wait(idle)
    written = page.text(of("complete", ".text"))
    assert written.startswith("Once")
    page.click("nav a[href^='#explain']")
    done(page, "explain")
    page.click("nav a[href^='#complete']")  # coming back begins nothing anew
    assert page.text(of("complete", ".text")) == written
    page.wait(idle)


def test_an_address_that_means_nothing_is_the_first_view(page: Page) -> None:
    for name in ("nowhere", "constructor", "__proto__", "toString?text=a"):
        ask(page, name)
        page.wait("!document.querySelector('[data-view=translate]').hidden")


def test_the_way_to_the_content_keeps_the_address(page: Page) -> None:
    result(page, "explain")
    page.says("document.querySelector('.skip').click()")
    assert page.says("location.hash") == "#explain"
    assert page.says("document.activeElement.id") == "main"


def test_what_cannot_be_looked_at_leaves_no_heads_of_another(page: Page) -> None:
    result(page, "look", model="books-gpt2", text="The cat sat.")
    refusal(page, "look", model="nobody", text="The cat sat.")
    assert not page.texts(of("look", ".measure"))


def test_all_heads_and_then_one(page: Page) -> None:
    ask(page, "look")
    submit(page, "look")
    assert page.texts(".measure h3")[-1] == "Induction"
    text = "The cat sat on the mat. The cat sat on the mat."
    induction = regard.look("books-gpt2", text).values["induction"]
    shown = page.texts(".measure:last-of-type button")
    assert float(shown[3 * 4 + 1]) == pytest.approx(induction[3, 1].item(), abs=0.01)
    page.click(".measure:last-of-type button", 3 * 4 + 1)
    page.wait("document.querySelector('.head .map')")
    done(page, "look")
    found = regard.look("books-gpt2", text, layer=3, head=1)
    assert page.texts(".head .chips .unit") == list(found.queries)
    assert "layer=3&head=1" in page.says("location.hash")
    assert page.texts(".measure button[aria-pressed=true]")[-1] == shown[3 * 4 + 1]
    page.point(".head .unit", 9)  # the second "sat" looks at what followed the first
    assert page.text(".attended:last-of-type").startswith("sat attended to")
    assert "on" in page.texts(".head .lit")
    page.click(".head [type=checkbox]")
    assert page.texts(".head td.out")[0] == "1.00"
    page.says("history.back()")
    page.wait("!document.querySelector('.head .map')")


def test_an_encoder_decoder_has_heads_across(page: Page) -> None:
    ask(page, "look", text=f">>fra<< {CAT}", model="translate", layer="cross.1", head=0)
    page.wait("document.querySelector('.head .map')")
    assert "chat" in page.texts(".head .chips")[0]
    assert "cat" in page.texts(".head .chips")[1]


def test_every_step_of_one_attention(page: Page) -> None:
    result(page, "explain")  # by itself: it needs no model
    trace = regard.explain()
    assert page.texts(".steps h3") == [f"{n}{s.name}" for n, s in enumerate(trace.steps, 1)]
    assert "0.119" in page.text(".steps li:nth-child(6) .followed")
    assert "✓ Check" in page.text(".check")
    page.click(of("explain", ".chosen button"), 5)
    page.wait("location.hash.includes('word=mat')")
    done(page, "explain")
    page.wait("document.querySelector('.steps .followed th').textContent === 'mat'")
    result(page, "explain", sentence=CAT, model="books-gpt2", layer=1)
    assert "GPT2, layer 1, head 0" in page.text(of("explain", ".facts"))


def test_what_is_wrong_is_said_where_it_was_asked(page: Page) -> None:
    said = refusal(page, "translate", text="a", to="klingon")
    assert "does not translate into 'klingon'" in said
    page.click("nav a:nth-child(6)")
    done(page, "explain")
    assert page.says("document.title") == "Explain · regard"


def test_it_says_when_the_server_has_gone(page: Page) -> None:
    with serving() as (elsewhere, process):
        page.open(f"{elsewhere}/#explain")
        done(page, "explain")
        process.kill()
        process.wait()
        page.click(of("explain", "form button"))
        page.wait("document.querySelector('[role=alert]')")
        assert "Is regard serve still running?" in page.text("[role=alert]")
    page.errors.clear()
    page.asked.clear()


def test_it_fits_a_phone_by_day_and_by_night(page: Page) -> None:
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    paper = "getComputedStyle(document.querySelector('.result .card')).backgroundColor"
    small = (  # for a thumb
        "[...document.querySelectorAll('section:not([hidden]) form button, nav a')]"
        ".filter((e) => e.getBoundingClientRect().height < 36).length"
    )
    for view in VIEWS:
        page.look_as(width=375, height=700)
        ask(page, view)
        submit(page, view)
        assert not page.says(wide), view
        assert page.says(small) == 0, view
        assert page.says(paper) == LIGHT
        page.look_as(width=375, height=700, dark=True)
        assert page.says(paper) == DARK


def test_every_field_has_a_name(page: Page) -> None:
    ask(page, "")
    nameless = page.says(
        "[...document.querySelectorAll('input:not([type=hidden]), select, textarea')]"
        ".filter((e) => !e.labels.length && !e.ariaLabel).length"
    )
    assert nameless == 0
    page.press("Tab")
    assert page.says("document.activeElement.textContent") == "Skip to the content"


def test_its_colours_are_those_of_pictures() -> None:
    from regard.pictures.colours import hexadecimal, ramp, roles
    from regard.server.app import SHADES, _colours

    light, dark = _colours().splitlines()
    for css, night in ((light, False), (dark, True)):
        assert f"--ink:{hexadecimal(roles(night)['ink'])};" in css
        assert f"--s{SHADES - 1}:{hexadecimal(ramp(dark=night, signed=False)[-1])};" in css
    script = (Path(regard.__file__).parent / "server/web/page.js").read_text(encoding="utf-8")
    assert re.search(r"SHADES = (\d+)", script)[1] == str(SHADES)
    assert "innerHTML" not in script
