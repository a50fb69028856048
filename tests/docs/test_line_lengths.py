"""Pages are read in terminals, too: their text has at most 100 columns."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
MAX_COLUMNS = 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_text_has_at_most_100_columns(page):
    """Tables, headings, code and links can't be wrapped."""
    is_code, long = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and len(line) > MAX_COLUMNS and not line.startswith(("|", "#")) and "](" not in line:
            long.append(f"{page.name}:{number}: {len(line)} columns")
    assert not long, "\n".join(long)
