"""Prompts for whoever brings none: our own sentences, put together from forms and subjects.

Owns the two sides: a subject whose number is a multiple of `EVERY` is held out, so that no held-out prompt shares its
subject with one that a drafter was trained on. Also reads prompts from a user's files.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from opt_tree.training.answers import lines

EVERY = 6
"""One subject in so many is held out."""

SUBJECTS = """rain|bread|glaciers|bicycles|the moon|honey|bridges|volcanoes|tea|earthquakes|windmills|whales|paper|
chess|coral reefs|lighthouses|cheese|maps|clocks|deserts|violins|vaccines|tides|rice|compasses|bees|concrete|owls|soap|
thunderstorms|coffee|railways|glass|penguins|olive oil|batteries|forests|kites|the heart|magnets|sourdough|canals|
spiders|rainbows|gardens|telescopes|salt|submarines|wool|mushrooms|libraries|horses|solar panels|fog|pottery|elevators|
butterflies|cement|dreams|aqueducts|potatoes|radio|the kidneys|snow|chocolate|sailing boats|inflation|passwords|wolves|
comets|insurance|swimming|dictionaries|steel|rivers|antibiotics|markets|thermometers|apples|puppets|satellites|yoga|
sundials|recycling|dolphins|mortgages|jazz|bamboo|the immune system|fireworks|lemons|elections|backpacks|hurricanes|
wine|zippers|museums|electric cars|ants|typewriters|blood pressure|rockets|rope|tomatoes|interest rates|beavers|
photography|sleep|the stomach|saffron|tunnels|plastic|flutes|migration|beaches|databases|eggs|fables|ferries"""

FORMS = """Explain to a child how {subject} came to be what people know today.|Write a short paragraph about {subject}.|
What are three surprising facts about {subject}?|List five questions that a teacher could ask about {subject}.|
Give me advice for somebody who wants to learn more about {subject}.|Why do people care about {subject}?|
Write an email to a friend in which you recommend a documentary on {subject}.|
Describe {subject} to a person who has never heard of the subject.|Write a poem of eight lines about {subject}.|
What is a common misunderstanding about {subject}, and what is true instead?|
Compare {subject} of two hundred years ago with {subject} of today.|
Write the beginning of a story in which {subject} play or plays an important part.|
I have to give a talk of two minutes on {subject}. Write it for me.|
Which words should I know before I read a textbook chapter on {subject}? Define each in one sentence.|
Summarise the most important things about {subject} in four bullet points.|
How would the world be different without {subject}?|Write a dialogue between two neighbours who talk about {subject}.|
What does science say about {subject}?|Suggest a title and an outline for an article about {subject}.|
Plan a lesson of one hour on {subject} for pupils of twelve years.|
Name an advantage and a drawback that have to do with {subject}, and explain both.|
Translate into simple English: "The literature on {subject} is extensive and partly contradictory."|
Is it expensive to work with {subject}? Explain what the costs depend on.|
Write a quiz with four questions about {subject} and give the answers below."""

TASKS = """reverses a string|counts the vowels in a text|finds the largest number in a list|merges two sorted lists|
checks whether a word is a palindrome|computes the factorial of a number|removes duplicates from a list|
converts degrees Celsius to Fahrenheit|counts how often each word occurs in a text|checks whether a number is prime|
reads a CSV file and sums a column|sorts a list of names by their length|computes the average of a list|
finds the common elements of two lists|turns a number into Roman numerals|flattens a nested list|
rotates a matrix by ninety degrees|splits a list into chunks of a given size|validates an e-mail address|
computes the n-th Fibonacci number|finds the longest word of a sentence|swaps the keys and values of a dictionary|
prints a multiplication table|computes the greatest common divisor of two numbers"""

CODE = """Write a Python function that {subject}.|
Write a JavaScript function that {subject}, and explain it line by line.|
Show me a program in C that {subject}.|Write a unit test for a function that {subject}."""

SUMS = """A shop sells {a} boxes of {b} pencils each and {c} single pencils. How many pencils does it sell?|
Anna reads {a} pages on each of {b} days and {c} pages on the last day. How many pages does she read?|
A train has {a} coaches with {b} seats each; {c} seats are taken. How many seats are free?|
A farmer packs {a} crates of {b} apples. {c} apples are rotten. How many good apples are there?"""


def _split(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("|")]


def default_prompts(heldout: bool = False) -> list[str]:
    """All prompts of one side in a fixed order that mixes their kinds: thousands to train on, hundreds held out."""
    numbers = [{"a": 3 + n % 17, "b": 4 + 7 * n % 29, "c": 5 + 11 * n % 23} for n in range(60)]
    everything = [
        *(_filled(_split(FORMS), [{"subject": subject} for subject in _split(SUBJECTS)], heldout)),
        *(_filled(_split(CODE), [{"subject": task} for task in _split(TASKS)], heldout)),
        *(_filled(_split(SUMS), numbers, heldout)),
    ]
    return [everything[index] for index in np.random.default_rng(0).permutation(len(everything))]


def _filled(forms: Iterable[str], known: list[dict[str, object]], heldout: bool) -> Iterator[str]:
    side = [fields for number, fields in enumerate(known) if (number % EVERY == 0) is heldout]
    for form, fields in itertools.product(forms, side):
        yield form.format(**fields)


def read_prompts(paths: Iterable[Path]) -> list[str]:
    """The prompts of a user's files, in their order, each once.

    `.jsonl` and `.jsonl.xz`: a row's "prompt", "question" or "text", or the first of its "turns"; any other file: a
    prompt a line. Raises ValueError for a row without one, and for no prompt at all.
    """
    found = dict[str, None]()
    for path in paths:
        if path.suffixes[-2:] == [".jsonl", ".xz"] or path.suffix == ".jsonl":
            rows = [_prompt_of(row, f"{path}:{number}") for number, row in enumerate(lines(path), 1)]
        else:
            try:
                rows = path.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is neither JSONL nor text: {error}") from error
        found |= dict.fromkeys(row.strip() for row in rows if row.strip())
    if not found:
        raise ValueError(f"no prompts in {', '.join(map(str, paths))}")
    return list(found)


def _prompt_of(row: dict[str, object], where: str) -> str:
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    text = row.get("prompt") or row.get("question") or row.get("text") or first
    if not isinstance(text, str):
        raise ValueError(f'{where}: no "prompt", "question", "text" or "turns"')
    return text
