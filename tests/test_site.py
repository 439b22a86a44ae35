"""What the site makes of a page that is written for the repository (docs/site/hooks.py)."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="requirements/site.txt is not installed")

ROOT = Path(__file__).parents[1]
HOOKS = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (
            "[heads.md](heads.md#block-drafters)",
            "[Heads and block drafters, layout by layout](heads.md#block-drafters)",
        ),
        ("[GPU](../results/gpu.md)", "[GPU](results/gpu.md)"),
        ("[start](../README.md)", "[start](index.md)"),
        (
            "[`OptTree.expand`](../opt_tree/policy.py)",
            "[`OptTree.expand`](reference/policy.md#opt_tree.policy.OptTree.expand)",
        ),
        ("[`Decoder._answer`](../opt_tree/decoder.py)", "[`Decoder._answer`](reference/decoder.md)"),
        ("[backends](../opt_tree/backends)", "[backends](reference/backends/index.md)"),
        ("[one](../examples/custom_policy.py)", "[one](there/blob/main/examples/custom_policy.py)"),
        ("[evaluation](../evaluation)", "[evaluation](there/tree/main/evaluation)"),
        ("`[no](link.md)` [below](#here)", "`[no](link.md)` [below](#here)"),
    ],
)
def test_a_link_leads_to_the_site_or_to_the_repository(written: str, shown: str) -> None:
    assert HOOKS["links"](written, "docs/a.md", "a.md", "there") == shown


def test_without_an_address_of_the_repository_the_text_stays() -> None:
    assert HOOKS["links"]("[one](../examples/custom_policy.py)", "docs/a.md", "a.md", "") == "one"


def test_a_link_that_leads_nowhere_ends_the_build() -> None:
    with pytest.raises(Exception, match="which is not there"):
        HOOKS["links"]("[x](nowhere.md)", "docs/a.md", "a.md", "")


def test_a_list_has_four_spaces_a_level_and_a_line_before_it() -> None:
    written = ["text", "- one", "  more", "  - below", "1. two", "", "   ```", "   - code", "   ```", "", "after"]
    shown = [
        "text",
        "",
        "- one",
        "    more",
        "    - below",
        "1. two",
        "",
        "    ```",
        "    - code",
        "    ```",
        "",
        "after",
    ]
    assert list(HOOKS["lists"](written)) == shown


def test_a_drawing_in_a_docstring_is_a_block() -> None:
    fenced = HOOKS["DRAWN"].sub(HOOKS["_fenced"], "Example:\n\n      root\n     /   \\\n\nText.\n\n    x = draw(1)\n")
    assert fenced == "Example:\n\n```text\n root\n/   \\\n```\n\nText.\n\n```python\nx = draw(1)\n```\n"
