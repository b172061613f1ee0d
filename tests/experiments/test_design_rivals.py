import pytest

from experiments import design

TOY = {
    "overrides": "model=toy training=toy cluster=toy",
    "knobs": ["device.memory", "device.peak_flops"],
}


@pytest.mark.parametrize("method", list(design.METHODS))
def test_methods_end_between_bound_and_reference(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(design.LIBRARY.get(method, "numpy"))
    monkeypatch.setattr(design, "CASES", {"toy": TOY})
    options = design.DesignStudyOptions(calls=25)
    (row,) = design.spend(design.Task("toy", method, 0, options, design.truth("toy")))
    assert row.bound_s <= row.iteration_time_s <= row.reference_s * (1 + 1e-9)
    assert (row.gap <= 0.01) == (row.calls_1 < float("inf"))
