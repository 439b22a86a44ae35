"""The chat page of examples/: a race by two clocks, whose texts are plain decoding's."""

import re
import shutil
import socket
import threading
import time
import types

import pytest

from examples import chat
from opt_tree import Pair, load_pair
from opt_tree.methods.drafters.tables.ngram import NGramDrafter


@pytest.fixture(scope="module")
def room():
    pair = load_pair("demo", "eagle:demo", dtype="float32")
    return chat.Room("demo", pair, {"eagle:demo": pair.drafter, "ngram": NGramDrafter()})


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_both_sides_write_the_same_and_the_slower_clock_waits(room):
    for drafter in room.drafters:
        drafted, plain = runners = room.runners(ask("What is a fox?"), chat.Chosen(drafter, length=12))
        before = [0.0, 0.0]
        for runner in chat.race(runners):
            mine = runners.index(runner)
            assert before[mine] <= before[1 - mine] or runners[1 - mine].ended
            before[mine] = runner.seconds
        assert drafted.tokens == plain.tokens and len(plain.generation.steps) == len(plain.tokens)
        assert drafted.ended == plain.ended and drafted.generation.mean_acceptance_length > 1


def test_both_sides_are_compiled_alike(room, monkeypatch):
    """A tree on compiled forwards beside plain decoding on eager ones would be no fair race."""
    compiled = []
    monkeypatch.setattr(chat, "compile_forwards", lambda lm, make: compiled.append((lm, make)))
    monkeypatch.setattr(Pair, "compile", lambda pair, make: compiled.append((pair.target, make)))
    made = chat.Room("demo", room.pair, room.drafters, make=True)
    sides = made.runners(ask("What is a fox?"), chat.Chosen("ngram"))
    assert compiled == [(side.decoder.target, True) for side in reversed(sides)]


def test_a_conversation_goes_on_and_its_turns_are_shown_as_text(room):
    chosen = chat.Chosen("eagle:demo", nodes=5, length=12, beside=False)
    *_, (turns, sides, note, trees) = chat.answers(room, ask("Is 3 < 4 & 5 > 4?"), chosen)
    assert turns[-1] == {"role": "assistant", "content": turns[-1]["content"]} and len(sides) == 1 and note == ""
    assert "Is 3 &lt; 4 &amp; 5 &gt; 4?" in sides[0] and "<iframe srcdoc=" in trees
    longer = room.runners([*turns, *ask("Why?")], chosen)[0]
    assert len(longer.prompt) > len(room.runners(ask("Why?"), chosen)[0].prompt) + len(turns[-1]["content"].split())
    before = room.pair.target.work.tokens
    longer.advance()
    assert room.pair.target.work.tokens - before < len(longer.prompt) / 2, "the first turn was taken in anew"
    while longer.ended is None:
        longer.advance()
    assert longer.tokens == longer.decoder.generate(longer.prompt, 12, stop=room.pair.stop).tokens


@pytest.mark.slow
def test_above_temperature_0_an_answer_has_a_seed_of_its_own_and_both_sides_share_it(room):
    def texts(seed: str) -> list[list[int]]:
        chosen = chat.Chosen("ngram", nodes=3, length=8, temperature=1.0, seed=seed)
        *_, last = chat.race(runners := room.runners(ask("What is a fox?"), chosen))
        assert last.ended and f"Seed {runners[0].seed} gives this text again." in chat.compared(runners)
        assert runners[0].tokens == runners[1].tokens
        return runners[0].tokens

    assert texts("") != texts("") and texts("3") == texts("3")
    with pytest.raises(ValueError, match="the seed is a whole number or empty, not '3x'"):
        texts("3x")


def test_the_end_says_how_much_faster_it_was_and_where_texts_part(room):
    runners = room.runners(ask("What is a fox?"), chat.Chosen("ngram", length=4))
    list(chat.race(runners))
    for runner, seconds in zip(runners, (1.0, 1.5), strict=True):
        runner.seconds = seconds
    assert chat.compared(runners).startswith("**1.50 times** as fast as plain decoding: 4.0 and 2.7 tokens/s.")
    assert "part at" not in chat.compared(runners)
    runners[1].tokens[2] += 1
    assert "The texts part at token 3: in float32 rounding" in chat.compared(runners)
    assert chat.compared(runners[:1]) == ""


def test_a_stopped_answer_has_no_caret(room):
    turns = ask("What is a fox?")
    (runner,) = room.runners(turns, chat.Chosen("ngram", length=9, beside=False))
    runner.advance()
    side = chat.drawn(room, turns, runner)
    assert 'class="answer"' in side
    left, right, note = chat.stopped(side, "", "Answering.")
    assert 'class="answer ended"' in left and right == "" and note == "Stopped."
    assert chat.stopped(left, "", "1.3 times") == [left, "", "1.3 times"], "it was over already"


def test_a_port_in_use_is_said_in_one_line_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(chat.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(chat, "load", lambda arguments: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert chat.main(["--port", str(port)]) == 2
    told = capsys.readouterr().err
    assert re.match(f"error: cannot serve at 127.0.0.1:{port}: .*; --port names another\n$", told)
    assert chat.main(["--port", "99999"]) == 2
    assert "99999: bind(): port must be 0-65535.; --port" in capsys.readouterr().err


def test_every_tree_of_the_list_can_be_made_and_what_is_wrong_is_said(capsys):
    for tree in chat.TREES:
        assert chat.Chosen("ngram", tree, nodes=7).policy.max_depth > 0
    assert chat.main(["--drafter", "nothing:here"]) == 2
    assert "unknown kind of drafter 'nothing'" in capsys.readouterr().err


def test_ctrl_c_closes_the_page_and_says_so_in_its_status(monkeypatch):
    class Interrupted:
        def wait(self):
            raise KeyboardInterrupt

    done = []
    page = types.SimpleNamespace(
        launch=lambda **given: done.append(given),
        close=lambda verbose: done.append("closed"),
    )
    monkeypatch.setattr(chat.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(chat, "load", lambda arguments: None)
    monkeypatch.setattr(chat, "check_port", lambda host, port: None)
    monkeypatch.setattr(chat, "page", lambda room, known: page)
    monkeypatch.setattr(chat, "threading", types.SimpleNamespace(Event=Interrupted))
    status = chat.main(["--port", "7", "--host", "0.0.0.0", "--share"])
    launched = {"server_name": "0.0.0.0", "server_port": 7, "share": True, "prevent_thread_lock": True}
    assert (status, done) == (130, [launched, "closed"])


@pytest.mark.slow
def test_in_a_browser(room, tmp_path, monkeypatch):
    """With gradio, selenium and chromium: two visitors ask, one waits and stops, one sees the end and the trees.

    The one chose gradio's dark mode: what is ours follows it, in the frame too.
    """
    pytest.importorskip("gradio")
    webdriver = pytest.importorskip("selenium.webdriver")
    browsers = ("chromium", "chromium-browser", "google-chrome")
    chromium, service = next(filter(None, map(shutil.which, browsers)), None), shutil.which("chromedriver")
    if not chromium or not service:
        pytest.skip("needs chromium and its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless", "no-sandbox", "disable-background-networking", f"user-data-dir={tmp_path}"):
        options.add_argument(f"--{flag}")
    waited, looked_at = threading.Event(), threading.Event()
    monkeypatch.setattr(chat.Runner, "advance", held_back(chat.Runner.advance, waited, looked_at))
    blocks = chat.page(room, None)
    _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True)
    driver = webdriver.Chrome(options, webdriver.ChromeService(service))
    try:
        driver.implicitly_wait(60)
        for place in range(2):  # two visitors: the second one waits
            driver.switch_to.window(driver.window_handles[0]) if not place else driver.switch_to.new_window("tab")
            driver.get(f"{address}?__theme={'light' if place else 'dark'}")
            driver.find_element("css selector", "#settings button")
            assert controls(driver) == 0, "the settings are closed"
            driver.find_element("css selector", "#message textarea").send_keys("What is a fox?\n")
        driver.find_element("xpath", "//*[@id='note'][contains(., 'queue: 1/1')]")
        for side in ("drafted", "plain"):  # the question shows before its turn comes
            assert driver.find_element("css selector", f"#{side} .user").text == "What is a fox?"
        assert driver.find_element("css selector", "#message textarea").get_attribute("value") == ""
        waited.set()
        driver.find_element("css selector", "#plain .answer")
        driver.find_element("xpath", "//button[contains(., 'Stop')]").click()
        looked_at.set()
        driver.find_element("xpath", "//*[@id='note'][contains(., 'Stopped.')]")
        assert driver.find_element("css selector", "#drafted .answer").get_attribute("class") == "answer ended"
        driver.switch_to.window(driver.window_handles[0])
        drafted, plain = (driver.find_element("css selector", f"#{side} .ended").text for side in ("drafted", "plain"))
        assert drafted == plain and len(drafted.split()) > 3
        driver.find_element("xpath", "//*[@id='note'][contains(., 'as fast as plain decoding')]")
        assert styled(driver, "#drafted .drafted", "backgroundColor") == BLUE
        driver.find_element("xpath", "//button[contains(., 'The trees of')]").click()
        driver.switch_to.frame(driver.find_element("css selector", "#trees iframe"))
        assert (
            styled(driver, "body", "backgroundColor") == PAPER
            and styled(driver, ".legend .drafted", "backgroundColor") == BLUE
        )
        text = driver.find_element("css selector", ".explorer .answer").text
        assert text.split()[:3] == drafted.split()[:3]
        assert len(driver.find_elements("css selector", "#tree svg circle")) > 1, "no tree is drawn"
        driver.switch_to.default_content()
        narrow = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}  # windows are 500 wide at least
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
        assert controls(driver) == 0 and "What is a fox?" in driver.find_element("id", "drafted").text
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 400, "the page is wider than the screen"
        driver.find_element("css selector", "#settings button").click()
        box, label = (driver.find_element("css selector", f"#beside {part}") for part in ("input", "span"))
        assert label.rect["height"] < 2 * box.rect["height"], "the label has no room"
        driver.save_screenshot(str(tmp_path / "chat.png"))
    finally:
        driver.quit()
        blocks.close()


def controls(driver):
    """How many sliders can be seen."""
    seen = "return [...document.querySelectorAll('input[type=range]')].filter(each => each.offsetParent).length"
    return driver.execute_script(seen)


PAPER, BLUE = "rgb(13, 17, 23)", "rgb(16, 41, 74)"
"""Of the dark mode: the background of a frame, and of what was drafted."""


def styled(driver, selector, name):
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return driver.execute_script(script, selector, name)


def held_back(advance, waited, looked_at):
    """Steps that wait for the test: the first visitor's until another one was seen to wait, and then the other one's
    second steps until Stop was pressed. From then on they take their time, so that Stop comes before the end."""
    runners = []

    def step(runner):
        if not any(runner is known for known in runners):
            runners.append(runner)
        place = [runner is known for known in runners].index(True)
        if place < 2:
            waited.wait(300)
        elif runner.tokens:
            looked_at.wait(300)
            time.sleep(0.2)
        advance(runner)

    return step
