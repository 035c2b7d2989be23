"""``python -m monarch.cli``: the same as ``monarch``."""

import sys

from monarch.cli import main

sys.exit(main())
