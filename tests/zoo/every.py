"""Every animal of the zoo: importing it fills the lists."""

from __future__ import annotations

import zoo.addresses
import zoo.correct
import zoo.correct_facts
import zoo.correct_layers
import zoo.correct_python
import zoo.correct_surroundings
import zoo.first_runs
import zoo.gaps
import zoo.host_reads
import zoo.host_values
import zoo.kept_values
import zoo.launches
import zoo.modes
import zoo.on_gpu
import zoo.padding
import zoo.passing_values
import zoo.patches
import zoo.phases
import zoo.python_state
import zoo.python_values  # noqa: F401 - importing keeps its animals
from zoo.judge import BUGS, CORRECT

__all__ = ["BUGS", "CORRECT"]
