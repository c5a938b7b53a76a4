"""Documents that speak of the code: what they quote is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def source() -> str:
    """All messages of the package: string literals that are continued on the next line are joined."""
    files = [file for folder in ("fp8_compile", "passes", "kernels") for file in (ROOT / folder).rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_every_message_that_troubleshooting_explains_is_one_that_the_code_gives() -> None:
    known = source()
    table = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    pieces = [piece for message in table for piece in re.split(r"\.\.\.", message) if len(piece.strip()) > 3]
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
    verbs = [path.stem for path in (ROOT / "fp8_compile" / "cli" / "verbs").glob("*.py") if path.stem != "__init__"]
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert [verb for verb in verbs if f"fp8-compile {verb}" not in text] == []
