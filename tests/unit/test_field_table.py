"""The table of fields in the docs is that of the code, and has all of OpenAI's."""

from __future__ import annotations

from pathlib import Path

import pytest

from field_table import BEGIN, END, OPENAI, ROUTES, VLLM, table

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_docs_have_the_table_of_the_code() -> None:
    text = DOCS.read_text()
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    assert text[begin:end] == table(), (
        "run: PYTHONPATH=src python tests/field_table.py, and put it into docs/serving.md"
    )


def test_every_field_that_is_read_is_in_it() -> None:
    shown = table()
    for route in ROUTES.values():
        missing = [name for name in (*route.body.__struct_fields__, *route.neutral) if f"| `{name}` |" not in shown]
        assert missing in ([], ["early_stopping", "typical_p", "top_a"]), "of other servers than vLLM"


def test_no_field_of_openai_or_vllm_is_unknown() -> None:
    """Clients send null for fields that they do not set: none of these may be taken for a misspelling."""
    for source in (OPENAI, VLLM):
        for name, fields in source.items():
            assert [field for field in fields.split() if ROUTES[name].fate(field) == "refused"] == []


@pytest.mark.slow
def test_openais_own_types_have_no_other_fields() -> None:
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    theirs = {
        "completions": completion_create_params.CompletionCreateParamsBase,
        "chat": chat_create_params.CompletionCreateParamsBase,
        "responses": response_create_params.ResponseCreateParamsBase,
        "embeddings": embedding_create_params.EmbeddingCreateParams,
    }
    for name, kind in theirs.items():
        assert set(kind.__annotations__) <= set(OPENAI[name].split()), f"add them to tests/field_table.py: {name}"
