"""The tests' own layout: what pytest needs to run them all in one go."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_two_modules_share_a_name():
    # Without packages pytest imports test modules by their bare names.
    counts = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in counts.items() if count > 1] == []
