"""What the tests of the server share."""

from __future__ import annotations

import os

# The cores that these tests start are tiny: a second thread each would only take turns with the tests themselves.
os.environ["OMP_NUM_THREADS"] = "1"
