"""The real programs meet the golden exports: `make test-clients`, in an environment of its own."""

import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import_module("tests")  # before a checkout, which has a package of that name

sys.path[:0] = filter(None, [os.environ.get("TORCHTITAN")])
with suppress(ImportError):  # before any test imports another module of torchtitan, which asks
    utils: Any = import_module("torchtitan.tools.utils")
    utils.device_type, utils.device_module = "cpu", torch.cpu
