from pathlib import Path

import pytest
import torch

from darts_parallel.bilevel.data import PARTS, load_corpus, part_of, sample
from darts_parallel.errors import UnsupportedError


def write_files(folder: Path) -> None:
    for index in range(40):
        (folder / f"module_{index:02d}.py").write_bytes(bytes([65 + index]) * 20_000)


def test_every_file_is_wholly_in_one_part(tmp_path: Path) -> None:
    write_files(tmp_path)
    parts = load_corpus(tmp_path)
    held = {name: set(getattr(parts, name).tolist()) for name in PARTS}
    assert sum(len(own) for own in held.values()) == len(set.union(*held.values())) == 40
    for name, own in held.items():
        assert own == {65 + i for i in range(40) if part_of(f"module_{i:02d}.py") == name}


def test_excluded_folders_are_not_read(tmp_path: Path) -> None:
    write_files(tmp_path)
    inner = tmp_path / "site-packages" / "deep"
    inner.mkdir(parents=True)
    (inner / "huge.py").write_bytes(b"!" * 50_000)
    corpus = load_corpus(tmp_path)
    assert not any(33 in getattr(corpus, name) for name in PARTS)


def test_a_folder_without_source_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="too little Python source"):
        load_corpus(tmp_path)


def test_windows_are_pieces_of_the_text_and_follow_from_the_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    windows = sample(text, 5, 7, torch.Generator().manual_seed(3))
    assert windows.shape == (5, 8)
    assert (windows.diff(dim=1) == 1).all()
    assert torch.equal(windows, sample(text, 5, 7, torch.Generator().manual_seed(3)))
