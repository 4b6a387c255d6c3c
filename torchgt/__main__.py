"""`python -m torchgt`: the command line, also under torchrun."""

import sys

from torchgt.cli import main

sys.exit(main())
