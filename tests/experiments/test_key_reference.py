"""The reference of keys is what the schema says."""

from experiments.key_reference import REFERENCE, page


def test_the_page_is_written_from_todays_schema() -> None:
    # python -m experiments.key_reference writes it
    assert REFERENCE.read_text(encoding="utf-8") == page()
