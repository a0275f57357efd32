"""`python -m lossops.bench`."""

import sys

from .cli import main

sys.exit(main())
