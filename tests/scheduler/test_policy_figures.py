"""The figures of docs/policies.md are what the library decides now."""
import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("policy_figures", DOCS / "policy_figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.figures()


def test_committed_figures_are_up_to_date(figures):
    for name, svg in figures.items():
        committed = (DOCS / "figures" / name).read_text(encoding="utf-8")
        assert committed == svg, f"{name} is old: run python docs/policy_figures.py"


def test_the_page_shows_all_of_them(figures):
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    for name, svg in figures.items():
        assert f"(figures/{name})" in page
        assert ElementTree.fromstring(svg).tag.endswith("svg")
