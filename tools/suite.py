"""What the tools measure with: the definitions in tests/ by which the suite judges results.

The tools and the tests are scripts in two folders, not packages, so tests/ is put on the path here.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import op_samples
from numerics import DTYPES, HALF_TYPES, bits_of, ulp

__all__ = ["DTYPES", "HALF_TYPES", "bits_of", "op_samples", "ulp"]
