"""The chat page of examples/: a race by two clocks, whose texts are plain decoding's."""

import importlib.util
import shutil
import sys
import types
from pathlib import Path

import pytest

from opt_tree import Pair, load_pair
from opt_tree.drafters import NGramDrafter

FILE = Path(__file__).parent.parent / "examples" / "chat.py"


@pytest.fixture(scope="module")
def chat():
    spec = importlib.util.spec_from_file_location("chat_page", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["chat_page"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def room(chat):
    pair = load_pair("demo", "eagle:demo", dtype="float32")
    return chat.Room("demo", pair, {"eagle:demo": pair.drafter, "ngram": NGramDrafter()})


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_both_sides_write_the_same_and_the_slower_clock_waits(chat, room):
    for drafter in room.drafters:
        drafted, plain = runners = room.runners(ask("What is a fox?"), chat.Chosen(drafter, length=24))
        before = [0.0, 0.0]
        for runner in chat.race(runners):
            mine = runners.index(runner)
            assert before[mine] <= before[1 - mine] or runners[1 - mine].ended
            before[mine] = runner.seconds
        assert drafted.tokens == plain.tokens and len(plain.generation.steps) == len(plain.tokens)
        assert drafted.ended == plain.ended and drafted.generation.mean_acceptance_length > 1


def test_both_sides_are_compiled_alike(chat, room, monkeypatch):
    """A tree on compiled forwards beside plain decoding on eager ones would be no fair race."""
    compiled = []
    monkeypatch.setattr(chat, "compile_forwards", lambda lm, make: compiled.append((lm, make)))
    monkeypatch.setattr(Pair, "compile", lambda pair, make: compiled.append((pair.target, make)))
    made = chat.Room("demo", room.pair, room.drafters, make=True)
    sides = made.runners(ask("What is a fox?"), chat.Chosen("ngram"))
    assert compiled == [(side.decoder.target, True) for side in reversed(sides)]


def test_a_conversation_goes_on_and_its_turns_are_shown_as_text(chat, room):
    chosen = chat.Chosen("eagle:demo", nodes=5, length=12, beside=False)
    *_, (turns, sides, trees) = chat.answers(room, ask("Is 3 < 4 & 5 > 4?"), chosen)
    assert turns[-1] == {"role": "assistant", "content": turns[-1]["content"]} and len(sides) == 1
    assert "Is 3 &lt; 4 &amp; 5 &gt; 4?" in sides[0] and "<iframe srcdoc=" in trees
    longer = room.runners([*turns, *ask("Why?")], chosen)[0]
    assert len(longer.prompt) > len(room.runners(ask("Why?"), chosen)[0].prompt) + len(turns[-1]["content"].split())
    before = room.pair.target.work.tokens
    longer.advance()
    assert room.pair.target.work.tokens - before < len(longer.prompt) / 2, "the first turn was taken in anew"
    while longer.ended is None:
        longer.advance()
    assert longer.tokens == longer.decoder.generate(longer.prompt, 12, stop=room.pair.stop).tokens


def test_every_tree_of_the_list_can_be_made_and_what_is_wrong_is_said(chat):
    for tree in chat.TREES:
        assert chat.Chosen("ngram", tree, nodes=7).policy.max_depth > 0
    with pytest.raises(SystemExit, match="unknown kind of drafter 'nothing'"):
        chat.main(["--drafter", "nothing:here"])


def test_ctrl_c_closes_the_page_and_says_so_in_its_status(chat, monkeypatch):
    class Interrupted:
        def wait(self):
            raise KeyboardInterrupt

    done = []
    page = types.SimpleNamespace(
        launch=lambda server_port, prevent_thread_lock: done.append((server_port, prevent_thread_lock)),
        close=lambda verbose: done.append("closed"),
    )
    monkeypatch.setattr(chat.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(chat, "load", lambda arguments: None)
    monkeypatch.setattr(chat, "page", lambda room, known: page)
    monkeypatch.setattr(chat, "threading", types.SimpleNamespace(Event=Interrupted))
    with pytest.raises(SystemExit) as ended:
        chat.main(["--port", "7"])
    assert (ended.value.code, done) == (130, [(7, True), "closed"])


def test_in_a_browser(chat, room, tmp_path):
    """With gradio, selenium and chromium: ask, and see both sides end with the same text."""
    pytest.importorskip("gradio")
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (chromium := shutil.which("chromium")) or not (service := shutil.which("chromedriver")):
        pytest.skip("needs chromium and its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless", "no-sandbox", "disable-background-networking", f"user-data-dir={tmp_path}"):
        options.add_argument(f"--{flag}")
    blocks = chat.page(room, None)
    _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True)
    driver = webdriver.Chrome(options, webdriver.ChromeService(service))
    try:
        driver.get(address)
        driver.implicitly_wait(60)
        driver.find_element("css selector", "#message textarea").send_keys("What is a fox?\n")
        drafted, plain = (driver.find_element("css selector", f"#{side} .ended").text for side in ("drafted", "plain"))
        assert drafted == plain and len(drafted.split()) > 3
        driver.find_element("xpath", "//button[contains(., 'The trees of')]").click()
        assert driver.find_element("css selector", "#trees iframe").is_displayed()
        driver.save_screenshot(str(tmp_path / "chat.png"))
    finally:
        driver.quit()
        blocks.close()
