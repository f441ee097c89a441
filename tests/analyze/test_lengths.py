"""The figure of summaries shows its values, also where there is no bar to see."""

from longspan.analyze.lengths import draw


def _all(value: float) -> dict[str, dict[str, float]]:
    return {name: {"value": value, "low": value, "high": value} for name in ("rouge1", "rouge2")}


def test_bars_are_labelled(tmp_path):
    arms = [{"name": name, "scores": _all(value)} for name, value in (("1K", 0.0), ("4K", 0.125))]
    found = {"data": "toys", "parameters": 9400, "examples": 2, "lead": _all(0.25), "arms": arms}
    draw(found, tmp_path / "a")
    drawn = (tmp_path / "a.svg").read_text()
    for shown in ("0.00", "12.50", "25.00"):
        assert f">{shown}<" in drawn
    assert "9.4K parameters" in drawn
