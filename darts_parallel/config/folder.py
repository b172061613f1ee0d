"""The folder of the configuration files."""

from pathlib import Path


def config_dir() -> str:
    """Return the folder of the configuration files: in an installed package, or in the checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return str(inside if inside.is_dir() else package.parent / "conf")
