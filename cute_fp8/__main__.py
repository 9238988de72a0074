"""``python -m cute_fp8``."""

import sys

from cute_fp8.cli import main

sys.exit(main())
