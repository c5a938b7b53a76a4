"""Tests of this folder import its other files by their bare names, as the benchmark does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
