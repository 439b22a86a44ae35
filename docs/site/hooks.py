"""Hooks of mkdocs.yml: the pages that lie outside docs/, the reference, and where a link of a page leads on the site.

Pages are written for the repository: their links name its files. Here a link to a page, a picture or a module of the
package leads to that page of the site, and a link to any other file to the repository, where REPOSITORY_URL says which.
"""

import ast
import itertools
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
RENAMED = {
    "README.md": "index.md",
    "RESULTS.md": "results/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LOWER = "---\nsearch:\n  boost: 0.5\n---\n"
"""Before a page that a search should list below those that explain."""
WIDE = ("compared.md", "claims.md", "reproduce.md")
"""Pages whose tables need the place of the table of contents."""
NAMES = re.compile(r"^(\w+: )?((?:[\w.-]+, ){30,}[\w.-]+)\.?$", flags=re.M)
"""A paragraph of nothing but names, behind one word at most that says of what."""
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", flags=re.M | re.S)
LINK = re.compile(r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<to>[^)\s:]+)\)")
DRAWN = re.compile(r"(?<=\n\n)(?:  .+\n?|\n(?=  ))+")
"""What stands indented in a docstring: a drawing, a formula, an example."""
ITEM = re.compile(r"( *)([-*]|\d+\.) +(?=\S)")


def site_path(path: str) -> str | None:
    """The page or file of the site that a path of the repository is; None for what is not on the site."""
    if path in RENAMED:
        return RENAMED[path]
    top, _, rest = path.partition("/")
    if top == "results" and path.endswith((".md", ".png")):
        return path
    if top == "results" and not rest:
        return RENAMED["RESULTS.md"]
    if top == "docs" and path.endswith((".md", ".svg")) and "/" not in rest:
        return rest
    if top == "opt_tree" and (ROOT / path).is_dir():
        path += "/__init__.py"
    if top == "opt_tree" and path.endswith(".py"):
        return f"reference/{path.partition('/')[2].removesuffix('.py')}.md".replace("__init__", "index")
    return None


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the pages of results and the modules to the navigation."""
    parts = {next(iter(part)): next(iter(part.values())) for part in config.nav}
    parts["Measured"] += [f"results/{file.name}" for file in sorted((ROOT / "results").glob("*.md"))]
    parts["API"] += _nav(ROOT / "opt_tree")
    return config


def _nav(folder: Path) -> list[Any]:
    names = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    found: list[Any] = [{one.stem: site_path(str(one.relative_to(ROOT)))} for one in names]
    below = sorted(one for one in folder.iterdir() if (one / "__init__.py").is_file())
    return [site_path(str(folder.relative_to(ROOT))), *({one.name: _nav(one)} for one in below), *found]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/."""
    for path in [*RENAMED, *(f"results/{file.name}" for file in (ROOT / "results").glob("*.md"))]:
        files.append(File.generated(config, site_path(path) or "", abs_src_path=str(ROOT / path)))
    for picture in (ROOT / "results" / "figures").iterdir():
        files.append(File.generated(config, f"results/figures/{picture.name}", abs_src_path=str(picture)))
    for file in sorted((ROOT / "opt_tree").rglob("*.py")):
        path = str(file.relative_to(ROOT))
        files.append(File.generated(config, site_path(path) or "", content=reference(file)))
    return files


def reference(file: Path) -> str:
    """The page of a module: what mkdocstrings makes of it, and its code; of a folder, its modules before."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    text = f"{LOWER}# {name}\n\n"
    if file.name == "__init__.py":
        inside = [one for one in sorted(file.parent.glob("*.py")) if one != file]
        inside += sorted(one for one in file.parent.glob("*/__init__.py"))
        rows = [f"| [{_name(one)}]({_beside(one, file)}) | {first_line(one)} |" for one in inside]
        text += "\n".join(["| module | what it owns |", "|---|---|", *rows]) + "\n\n" if rows else ""
    code = textwrap.indent(file.read_text(), "    ")
    source = f'??? quote "{file.relative_to(ROOT)}"\n\n    ~~~~~~python\n{code}    ~~~~~~\n'
    # The whole file, once: not found by a search, which has its docstrings already.
    return f"{text}::: {name}\n\n<div data-search-exclude markdown>\n\n{source}\n</div>\n"


def _name(file: Path) -> str:
    return f"{file.parent.name}/" if file.name == "__init__.py" else file.stem


def _beside(file: Path, page: Path) -> str:
    return str(file.relative_to(page.parent).with_suffix(".md")).replace("__init__", "index")


def first_line(file: Path) -> str:
    """The first sentence of a module's docstring."""
    said = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0]
    return " ".join(said.split()).replace("|", "\\|")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page for the site: links that lead where they should, lists as python-markdown reads them."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    renamed = {new: old for old, new in RENAMED.items()}
    source = renamed.get(uri, uri if uri.startswith("results/") else f"docs/{uri}")
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    text = links(markdown, source, uri, config.repo_url or "")
    text = NAMES.sub(lambda found: f'{found[1] or ""}<p class="names">{found[2].replace(", ", "<br>")}</p>', text)
    return "\n".join(lists(text.splitlines()))


def links(markdown: str, source: str, uri: str, repository: str) -> str:
    """The text of a page with links that lead where they should; what stands in code is no link."""
    code = CODE.findall(markdown)
    numbers = itertools.count()
    text = CODE.sub(lambda found: f"\0{next(numbers)}\0", markdown)
    text = LINK.sub(lambda found: linked(found, source, uri, code, repository), text)
    return re.sub(r"\0(\d+)\0", lambda found: code[int(found[1])], text)


def linked(found: re.Match[str], source: str, uri: str, code: list[str], repository: str) -> str:
    """A link of a page of the repository as the site has it. PluginError where it leads nowhere."""
    path, sharp, anchor = found["to"].partition("#")
    if not path:
        return found[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if target.startswith("..") or not (ROOT / target).exists():
        raise PluginError(f"{source} links to {path}, which is not there")
    to = site_path(target)
    if to is None:
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"[{found['text']}]({repository}/{kind}/main/{target}{sharp}{anchor})" if repository else found["text"]
    if target.endswith(".py") and not anchor:
        named = re.sub(r"\0(\d+)\0", lambda one: code[int(one[1])].strip("`"), found["text"])
        module = target.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        sharp, anchor = ("#", f"{module}.{named}") if defines(target, named) else ("", "")
    text = title(target) if found["text"].endswith(".md") else found["text"]
    return f"{found['mark']}[{text}]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}{sharp}{anchor})"


def title(path: str) -> str:
    """The heading of a page, which a link shows that names the page's file."""
    return (ROOT / path).read_text().partition("\n")[0].lstrip("# ")


def defines(path: str, name: str) -> bool:
    """Whether a module of the package has a public class, function or method of this name."""
    tree: ast.AST = ast.parse((ROOT / path).read_text())
    for part in name.split("."):
        found = [one for one in ast.iter_child_nodes(tree) if getattr(one, "name", None) == part]
        if not found or part.startswith("_"):
            return False
        tree = found[0]
    return True


def lists(lines: list[str]) -> Iterator[str]:
    """Lists with four spaces a level and a line before them: python-markdown wants both, Git hosts neither."""
    open_items: list[tuple[int, int]] = []
    before, fenced = "", False
    for line in lines:
        indent = len(line) - len(line.lstrip(" "))
        item = None if fenced else ITEM.match(line)
        if line.strip() and not fenced:
            while open_items and indent < (open_items[-1][1] if not item else open_items[-1][0] + 1):
                open_items.pop()
        level = len(open_items)
        if item and before.strip() and not ITEM.match(before) and not level and not before.startswith(" "):
            yield ""
        inside = open_items[-1][1] if open_items else 0
        yield "    " * level + line[min(inside, indent) :] if line.strip() else ""
        if item:
            open_items.append((len(item[1]), len(item[0])))
        fenced ^= line.lstrip().startswith("```")
        before = line


class Drawings(griffe.Extension):
    """What stands indented in a docstring becomes a block of code: Markdown would run it together into a paragraph."""

    def on_object(self, *, obj: griffe.Object, **more: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DRAWN.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    text = textwrap.dedent(found[0]).strip("\n")
    try:
        ast.parse(text)
    except SyntaxError:
        return f"```text\n{text}\n```\n"
    return f"```python\n{text}\n```\n"
