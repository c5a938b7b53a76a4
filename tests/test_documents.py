"""Documents that speak of the code: every name, message and link in them leads somewhere."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("fp8_compile", "passes", "kernels")
VERBS = [path.stem for path in (ROOT / "fp8_compile" / "cli" / "verbs").glob("*.py") if path.stem != "__init__"]
# Packages whose names are looked up by importing them.
LIBRARIES = {"torch": "torch", "nn": "torch.nn", "autograd": "torch.autograd", "fp8_compile": "fp8_compile"}
OTHER_PROGRAMS = ("pip", "apt-get", "CXX=g++", "import", "find_package(")  # commands that are not ours to check
# Names that are right though nothing of ours has them, and why.
EXCEPTIONS = {
    "v_rcp_f32": "an instruction of AMD's GPUs",
    "generation_config.json": "a file that transformers writes",
    "utils.py": "CONTRIBUTING.md names it as a file that must not be there",
    "experts.gate_up_proj_packed": "an attribute whose name is put together at run time",
}
# What torch's own objects have: documents name it on a variable, as in `optimizer.step()`.
THEIRS = {
    *(name for kind in (torch.Tensor, torch.nn.Module, torch.optim.Optimizer) for name in dir(kind)),
    *inspect.signature(torch.optim.AdamW).parameters,
}


@functools.cache
def tree() -> list[str]:
    """Every file and folder of the repository, as documents name them; folders end in a slash."""
    tops = [*FOLDERS, "tests", "docs", "examples", "benchmarks", ".ci"]
    below = [path for top in tops for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts]
    paths = [*ROOT.glob("*.*"), *(ROOT / top for top in tops), *below]
    return [f"{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in paths]


@functools.cache
def makefile() -> str:
    return (ROOT / "Makefile").read_text()


@functools.cache
def sources(*folders: str) -> str:
    return "\n".join(file.read_text() for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))


@functools.cache
def words() -> set[str]:
    """Every identifier of our code, and every word in its strings, but not in docstrings and comments."""
    found: set[str] = set()
    for folder in (*FOLDERS, "examples", "benchmarks", "tests/support"):
        for file in (ROOT / folder).rglob("*.py"):
            code = ast.parse(file.read_text())
            docstrings = {
                id(node.body[0].value)
                for node in ast.walk(code)
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
                and node.body
                and isinstance(node.body[0], ast.Expr)
            }
            for node in ast.walk(code):
                names = [getattr(node, field, None) for field in ("name", "id", "attr", "arg", "asname", "module")]
                if isinstance(node, ast.Constant) and id(node) not in docstrings:
                    names.append(node.value)
                found.update(word for name in names if isinstance(name, str) for word in re.findall(r"[\w-]+", name))
    cpp = [*(ROOT / "kernels" / "cpu").glob("*.cpp"), *(ROOT / "kernels" / "cpu").glob("*.h")]
    found.update(word for file in cpp for word in re.findall(r"\w+", file.read_text()))
    return found


def is_file(name: str, document: Path) -> bool:
    """True if exactly one path of the repository, or of the document's folder, is meant by ``name``."""
    if name in tree() or f"{name}/" in tree() or (document.parent / name).exists():
        return True
    return sum(path.endswith(f"/{name}") for path in tree()) == 1


def is_found(name: str) -> bool:
    """True for a dotted name that can be imported, or whose parts are words of our code or methods of torch's."""
    root, *parts = name.split(".")
    if root in LIBRARIES:
        found = importlib.import_module(LIBRARIES[root])
        for number, part in enumerate(parts):
            if not hasattr(found, part):
                try:
                    importlib.import_module(".".join([LIBRARIES[root], *parts[: number + 1]]))
                except ImportError:
                    return False
            found = getattr(found, part)
        return True
    return all(part in words() or part in THEIRS for part in parts or [root])  # `root` is a variable of the reader's


def library_arguments(call: str) -> set[str]:
    """The arguments of a function of torch's: `nn.Embedding(sparse=True)`."""
    root, _, name = call.partition(".")
    found = getattr(importlib.import_module(LIBRARIES[root]), name, None) if root in LIBRARIES else None
    return set(inspect.signature(found).parameters) if inspect.isroutine(found) or inspect.isclass(found) else set()


def wrong_names(span: str, document: Path) -> list[str]:
    """The names in one piece of code in backticks that lead nowhere. A formula, or a sentence, has no names."""
    if span in EXCEPTIONS or span.startswith(OTHER_PROGRAMS) or "#" in span or span == "...":
        return []
    first, *rest = span.split() or [""]
    if first == "fp8-compile":
        options = [one for one in rest if one.startswith("--")]
        known = sources("fp8_compile/cli")
        return [one for one in [*rest[:1], *options] if one not in VERBS and f'"{one}"' not in known]
    if first == "make":
        return [] if re.search(rf"^{rest[0]}:", makefile(), re.MULTILINE) else [span]
    if first == "python":
        return [] if is_file(rest[0], document) else [rest[0]]
    if re.fullmatch(r"--[\w-]+", span):
        return [] if f'"{span}"' in sources("fp8_compile/cli", "benchmarks", "examples") else [span]
    if variable := re.fullmatch(r"([A-Z][A-Z0-9_]+)=\S+", span):  # of the environment, or of make
        known = variable[1] in words() or re.search(rf"^{variable[1]} *\?=", makefile(), re.MULTILINE)
        return [] if known else [span]
    if re.fullmatch(r"[\w.-]+\.(py|md|cpp|h|js|css|svg|toml)|[\w.-]+/[\w./-]*", span):
        return [] if is_file(span, document) else [span]
    if span.startswith("fp8_compile::"):  # an operation
        return [word for word in re.findall(r"\w+", span.removeprefix("fp8_compile::")) if word not in words()]
    if re.fullmatch(r"[\w-]+\.jsonl?", span):  # a file that is written at run time
        return [] if f'"{span}"' in sources(*FOLDERS) else [span]
    if re.fullmatch(r"[.\w-]+", span):  # a word, a dotted name; with a number in it, a module of someone's model
        in_a_model = any(part.isdigit() for part in span.split(".")[1:])
        return [] if in_a_model or is_found(span.strip(".")) else [span]
    calls = re.findall(r"([A-Za-z_][\w.]*)\(", span)
    keywords = re.findall(r"(?:^|[(,]\s*)([a-z_]\w*)=", span)
    if not calls and not keywords or "..." in span.partition("(")[0]:
        return []
    calls = [call for call in calls if not hasattr(builtins, call)]
    theirs = {name for call in calls for name in library_arguments(call)}
    unknown = [name for name in keywords if name not in words() and name not in theirs]
    return [name for name in calls if not is_found(name)] + unknown


def spans(text: str) -> list[str]:
    """Pieces of code inside of sentences: not blocks of code, and not what a table of messages quotes."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\s*\n\s*(?=\S)", " ", re.sub(r"^\|(?! ).*$", "", prose, flags=re.MULTILINE))
    return re.findall(r"`([^`\n]+)`", prose)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_name_in_backticks_exists(document: Path) -> None:
    found = {span: wrong for span in spans(document.read_text()) if (wrong := wrong_names(span, document))}
    assert found == {}


def blocks(document: str) -> str:
    return "\n".join(re.findall(r"^```\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL))


def test_every_pass_has_its_line_in_the_way_of_a_graph() -> None:
    code = [ast.parse(file.read_text()) for file in (ROOT / "passes").rglob("*.py")]
    classes = [node for one in code for node in ast.walk(one) if isinstance(node, ast.ClassDef)]
    passes = {node.name for node in classes if any(getattr(base, "id", "") == "GraphPass" for base in node.bases)}
    told = set(re.findall(r"\w+", blocks("docs/architecture.md")))
    assert len(passes) > 20
    assert passes - told == set()


def test_files_in_the_drawings_of_the_architecture_exist() -> None:
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    found = re.findall(r"[\w./]+\.(?:py|cpp|h|js|css)\b", blocks("docs/architecture.md") + picture)
    assert len(found) > 20
    assert [name for name in found if not any(f"/{path}".endswith(f"/{name}") for path in tree())] == []


@pytest.mark.parametrize(
    "span",
    [
        "passes/joint/read_again.py",
        "fp8_compile/nowhere/",
        "pass_recorder.py",
        "fp8_compile.exprot(model)",
        "scaling_state(model).forgett()",
        "ReadAgainst",
        "attach(model, optimiser=1)",
        "fp8-compile explane model",
        "fp8-compile export m --weihgts nvfp4",
        "make tests",
        "python benchmarks/nothing.py",
        "FP8_COMPILE_DUMPS=folder",
        "torch.nn.functional.scaled_mn",
        "recipee=\"delayed\"",
        "fp8_compile::scaled_mn",
        "--no-such-option",
    ],
)
def test_a_name_that_does_not_exist_would_be_found(span: str) -> None:
    assert wrong_names(span, ROOT / "docs" / "tour.md")


def test_every_exception_is_used_and_has_a_reason() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert [name for name, reason in EXCEPTIONS.items() if f"`{name}`" not in text or not reason] == []


def messages(document: str) -> list[str]:
    """The first column of the tables of a document, where it is a quotation and nothing else."""
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / document).read_text(), re.MULTILINE)


def known_messages() -> str:
    """All messages of the package: string literals that are continued on the next line are joined."""
    return re.sub(r'"\s*\n\s*f?"', "", sources(*FOLDERS))


def test_every_message_that_troubleshooting_explains_is_one_that_the_code_gives() -> None:
    known, table = known_messages(), messages("troubleshooting.md")
    pieces = [piece for message in table for piece in re.split(r"\.\.\.", message) if len(piece.strip()) > 3]
    assert len(table) > 20
    assert [piece for piece in pieces if piece.strip() not in known] == []


def test_every_reason_that_is_explained_is_one_that_the_code_gives() -> None:
    known, table = known_messages(), messages("skipped.md")
    # What varies from case to case: names, numbers, formats, and the words that a sentence is put together from.
    examples = r"\.\.\.|'pattern'|wte|float64|cuda:\d+|[A-Z]=|\d+|blockwise|e\dm\d|, (?=tied|as wide)"
    pieces = [piece for reason in table for piece in re.split(examples, reason) if len(piece.strip()) > 3]
    assert len(table) > 20
    assert [piece for piece in pieces if piece.strip() not in known] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    missing = []
    for link in links:
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = document.parent / path if path else document
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor and target.exists() else []
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if not target.exists() or (anchor and anchor not in anchors):
            missing.append(link)
    assert missing == []


def test_every_verb_of_the_command_line_is_in_a_document() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert [verb for verb in VERBS if f"fp8-compile {verb}" not in text] == []


def test_every_script_that_prints_figures_is_in_the_document_of_figures() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    scripts = [file for file in (ROOT / "benchmarks").glob("*.py") if "__main__" in file.read_text()]
    assert [file.name for file in scripts if f"benchmarks/{file.name}" not in text] == []


FIGURE = r"\d\.\d+x\b|\d ms\b|\d tokens/s|\d dB\b|\d MB\b"


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_a_section_with_measured_figures_names_what_prints_or_holds_them(document: Path) -> None:
    """A command in ``benchmarks/`` or ``examples/`` prints a figure; a test holds it."""
    sections = re.split(r"^#+ ", document.read_text(), flags=re.MULTILINE)
    measured = {section.partition("\n")[0]: section for section in sections if re.search(FIGURE, section)}
    named = r"`(?:python )?(?:benchmarks|examples|tests)/[\w/]+\.py"
    assert [title for title, section in measured.items() if not re.search(named, section)] == []
