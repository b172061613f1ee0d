from pathlib import Path

import pytest
import torch

from darts_parallel.bilevel.data import is_validation, load_corpus, sample, unigram_entropy
from darts_parallel.errors import UnsupportedError


def write_files(folder: Path) -> None:
    for index in range(40):
        (folder / f"module_{index:02d}.py").write_bytes(bytes([65 + index]) * 20_000)


def test_every_file_is_wholly_in_one_part(tmp_path: Path) -> None:
    write_files(tmp_path)
    parts = load_corpus(tmp_path)
    train, validation = set(parts.train.tolist()), set(parts.validation.tolist())
    assert train.isdisjoint(validation)
    assert len(train) + len(validation) == 40
    assert validation == {65 + i for i in range(40) if is_validation(f"module_{i:02d}.py")}


def test_a_new_file_moves_no_other_file_to_the_other_part(tmp_path: Path) -> None:
    write_files(tmp_path)
    before = set(load_corpus(tmp_path).validation.tolist())
    (tmp_path / "aaa.py").write_bytes(b"!" * 50)
    assert set(load_corpus(tmp_path).validation.tolist()) - {33} == before


def test_a_folder_without_source_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="too little Python source"):
        load_corpus(tmp_path)


def test_windows_are_pieces_of_the_text_and_follow_from_the_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    windows = sample(text, 5, 7, torch.Generator().manual_seed(3))
    assert windows.shape == (5, 8)
    assert (windows.diff(dim=1) == 1).all()
    assert torch.equal(windows, sample(text, 5, 7, torch.Generator().manual_seed(3)))


def test_unigram_entropy_of_equal_shares_is_the_log_of_their_number() -> None:
    text = torch.arange(8, dtype=torch.uint8).repeat(10)
    assert unigram_entropy(text) == pytest.approx(torch.log(torch.tensor(8.0)).item())
