"""The real programs meet the golden exports: `make test-clients`, in an environment of its own."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
