from experiments.data.normalize import chunks_of


def test_layouts_are_read_as_megatron_reads_them() -> None:
    chunks = chunks_of("Et*3|(tt|)*29,m|L")
    assert (len(chunks), chunks[0], set(chunks[1:30]), chunks[30:]) == (
        32,
        "Ettt",
        {"tt"},
        ["m", "L"],
    )
    assert chunks_of("Et*2|(tt|)*2tL") == ["Ett", "tt", "tt", "tL"]
