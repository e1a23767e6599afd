"""Token ids of prompts: Python's own integers; numpy's and torch's are taken too."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

from phonograph.errors import RequestError


def as_token_id(token: Any) -> int:
    """One of them; what is no whole number is refused."""
    try:
        if not isinstance(token, bool):  # it has an index; as a token it is a slip
            return operator.index(token)
    except TypeError:
        pass
    raise RequestError(
        f"a prompt of token ids holds whole numbers; found {reprlib.repr(token)} ({type(token).__name__}). "
        "Give a text, or the ids that the model's tokenizer makes of it.",
        field="prompt",
    )
