"""docs/rules.md names the test for each rule of the transfer engine."""
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_the_document_of_rules_names_tests_that_exist():
    document = (TESTS.parent / "docs" / "rules.md").read_text()
    named = re.findall(r"`(test_\w+)`", document.partition("## The transfer engine")[2])
    there = set(re.findall(r"^(?:async )?def (test_\w+)", "".join(
        path.read_text() for folder in ("transfer", "lab/guest", ".")
        for path in sorted((TESTS / folder).glob("test_*.py"))), re.M))
    assert len(named) > 120 and set(named) <= there, sorted(set(named) - there)
