"""The real programs meet the golden exports: `make test-clients`, in an environment of its own."""

import os
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import_module("tests")  # before a checkout, which has a package of that name

sys.path[:0] = filter(None, [os.environ.get("TORCHTITAN")])
