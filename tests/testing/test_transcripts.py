import pytest

from flwr_decentral.testing.transcripts import REWRITE, check_golden, digest, first_difference

LINES = ["0 n0 Started up=1", "5 n1 Started up=0", "9 n0 LinkIdle", "10 n1 LinkIdle"]


def test_digest_depends_on_lines_and_their_order():
    assert digest(LINES) == digest(iter(LINES))
    others = [LINES[::-1], LINES[:-1], ["".join(LINES)], []]
    assert len({digest(lines) for lines in (LINES, *others)}) == 5


def test_first_difference_shows_where_and_what_was_before():
    changed = [*LINES[:3], "11 n1 LinkIdle"]
    assert first_difference(LINES, LINES) is None
    assert first_difference(LINES, changed).splitlines() == [
        "line 4 differs",
        "      0 n0 Started up=1",
        "      5 n1 Started up=0",
        "      9 n0 LinkIdle",
        "  expected: 10 n1 LinkIdle",
        "  actual:   11 n1 LinkIdle",
    ]
    assert first_difference(LINES, LINES[:2]).endswith("actual:   (the end)")
    assert "expected: (the end)" in first_difference([], LINES)


def test_golden_files_are_rewritten_only_when_asked(tmp_path, monkeypatch):
    golden = tmp_path / "golden" / "run.txt"
    monkeypatch.delenv(REWRITE, raising=False)
    with pytest.raises(
        AssertionError, match=r"no golden transcript .* with FLWR_DECENTRAL_REWRITE=1"
    ):
        check_golden(LINES, golden)
    assert not golden.exists()
    monkeypatch.setenv(REWRITE, "1")
    check_golden(LINES, golden)
    monkeypatch.setenv(REWRITE, "0")
    check_golden(LINES, golden)
    with pytest.raises(AssertionError, match=r"run\.txt: line 4 differs"):
        check_golden([*LINES[:3], "different"], golden)
    assert golden.read_text(encoding="utf-8").splitlines() == LINES
