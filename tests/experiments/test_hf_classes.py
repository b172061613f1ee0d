from pathlib import Path

import pytest

from darts_parallel.config.options import parse
from darts_parallel.errors import ConfigError

pytest.importorskip("transformers")
from experiments import hf_classes
from experiments.hf_classes import CLASSES, SIZES, HfClassesOptions


@pytest.mark.slow
def test_classes_are_accepted_or_refused_with_the_part_that_is_not_modelled(tmp_path: Path) -> None:
    given = ["only=[gpt2,beam,ministral]", "jobs=1", f"out={tmp_path}"]
    assert hf_classes.run(parse(HfClassesOptions, given)) == 0
    text = (tmp_path / "hf_classes.md").read_text()
    assert text.startswith("2 of 3 model types")
    assert ": gpt2, ministral." in text
    assert "Refused by part: BeamAttention (1)." in text
    assert "| beam | model.layers.0.self_attn (BeamAttention) is not modelled |" in text


def test_sizes_are_given_to_known_classes_alone() -> None:
    assert set(SIZES) <= set(CLASSES)
    with pytest.raises(ConfigError, match="only=gpt9 must be one of"):
        parse(HfClassesOptions, ["only=[gpt9]"])
