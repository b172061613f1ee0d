from pathlib import Path

import pytest

from darts_parallel.errors import ConfigError
from darts_parallel.problem.measured_times import FORWARD_FILE, MULTIPLIER_FILE, read_profiles

LAYERS = """source,model,gpu,tp,layer_index,layer_kind,forward_s
S,tiny,A10 (AWS g5),1,0,embedding,0.001
S,tiny,A10 (AWS g5),1,1,transformer,0.002
S,tiny,A10 (AWS g5),2,0,encoder_embedding,0.0015
AMP,other,T4 (AWS g4dn),1,0,,0.004
"""
MULTIPLIERS = """model,gpu,layer_kind,micro_batch,multiplier
tiny,A10 (AWS g5),transformer,1,1
tiny,A10 (AWS g5),transformer,2,1.5
tiny,A10 (AWS g5),transformer,4,3
tiny,A10 (AWS g5),embedding,1,1
tiny,A10 (AWS g5),embedding,8,2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / FORWARD_FILE).write_text(LAYERS)
    (tmp_path / MULTIPLIER_FILE).write_text(MULTIPLIERS)
    return tmp_path


def test_layers_are_found_by_model_gpu_and_degree(folder: Path) -> None:
    profiles = read_profiles(folder)
    profile = profiles.find("tiny", "A10", 1)
    assert profile.gpu == "A10 (AWS g5)"
    assert profile.kinds == ("embedding", "transformer")
    assert profile.forward_s == (0.001, 0.002)
    assert profiles.find("tiny", "a10", 2).kinds == ("encoder_embedding",)
    assert profiles.find("other", "T4", 1).kinds == ("",)


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("transformer", 1, 1.0),
        ("transformer", 2, 1.5),
        ("transformer", 3, 2.25),  # halfway between 1.5 and 3
        ("transformer", 16, 12.0),  # four times the last size
        ("encoder_embedding", 8, 2.0),  # the rows of its last word
        ("post_process", 4, 4.0),  # no rows: proportional
    ],
)
def test_multipliers_are_linear_between_and_proportional_beyond_measured_sizes(
    folder: Path, kind: str, size: int, expected: float
) -> None:
    assert read_profiles(folder).multiplier("tiny", "A10 (AWS g5)", kind, size) == pytest.approx(
        expected
    )


def test_without_a_multiplier_file_larger_micro_batches_are_proportional(folder: Path) -> None:
    (folder / MULTIPLIER_FILE).unlink()
    assert read_profiles(folder).multiplier("tiny", "A10 (AWS g5)", "transformer", 4) == 4.0


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "sentence"),
    [
        ("tny", "A10", 1, "model=tny must be one of other, tiny, which {} measured; try tiny."),
        (
            "tiny",
            "A100",
            1,
            "tiny=A100 must be one of A10 (AWS g5), which {} measured; try A10 (AWS g5).",
        ),
        ("tiny", "A10", 4, "{}: tp=4 of model tiny on A10 (AWS g5) must be measured; try 2."),
    ],
)
def test_what_was_not_measured_is_refused(
    folder: Path, model: str, gpu: str, tp: int, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_profiles(folder).find(model, gpu, tp)
    assert str(caught.value).endswith(sentence.format(folder))


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        (FORWARD_FILE, "forward_s", "seconds", "the column forward_s is missing"),
        (
            FORWARD_FILE,
            "model,gpu,tp",
            "model;gpu;tp",
            "commas must divide its columns, not semicol",
        ),
        (
            FORWARD_FILE,
            "0.002",
            "fast",
            "line 3: forward_s=fast must be a finite number of at least 0",
        ),
        (FORWARD_FILE, "0.002", "nan", "line 3: forward_s=nan must be a finite number"),
        (FORWARD_FILE, ",2,0,", ",0,0,", "line 4: tp=0 must be a whole number of at least 1"),
        (FORWARD_FILE, "1,1,transformer", "1,3,transformer", "layer_index=3 must count up from 0"),
        (FORWARD_FILE, ",0.004", "", "line 5: the row must have 7 fields"),
        (FORWARD_FILE, LAYERS.partition("\n")[2], "", "must hold at least one row"),
        (
            MULTIPLIER_FILE,
            "transformer,2,",
            "transformer,1,",
            "line 3: micro_batch=1 must begin at 1 and",
        ),
        (
            MULTIPLIER_FILE,
            "transformer,1,",
            "transformer,2,",
            "line 2: micro_batch=2 must begin at 1 and",
        ),
        (MULTIPLIER_FILE, ",1.5", ",-1", "multiplier=-1 must be a finite number of at least 0"),
    ],
)
def test_a_broken_file_is_one_sentence(
    folder: Path, name: str, old: str, new: str, sentence: str
) -> None:
    path = folder / name
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read_profiles(folder)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert sentence in message
    assert "try " in message
    assert message.count("\n") == 0


def test_a_missing_folder_or_file_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a CSV file, or a folder .*try cost=analytic"):
        read_profiles(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        read_profiles(tmp_path)


def test_bytes_that_are_no_text_are_refused(folder: Path) -> None:
    (folder / FORWARD_FILE).write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="is not a CSV file"):
        read_profiles(folder)
