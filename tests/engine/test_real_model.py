"""The demo's real part, shortened, in exact mode: there the bits must agree, not only tokens."""
import pytest


@pytest.mark.needs("model")
def test_smollm2_says_the_same_in_every_mode(tmp_path):
    from kvio.engine.demo import real_part
    part = real_part(str(tmp_path), exact=True, num_turns=2, num_new_tokens=4)
    assert part["tokens_equal"] and part["mismatches"] == {"basic": [], "dualpath": []}
    for mode in ("basic", "dualpath"):
        figures = part["modes"][mode]
        assert figures["hits_as_predicted"] and figures["hit_tokens"] > 0
        assert figures["replans"] == figures["persist_failures"] == 0
    assert part["modes"]["basic"]["paths"] == {
        "pe": 3, "de": 0, "split": 0, "any": 0}
    paths = part["modes"]["dualpath"]["paths"]
    assert paths["pe"] + paths["de"] == 3 and paths["pe"] and paths["de"]
    assert part["modes"]["none"]["hit_tokens"] == 0
