"""Embeddings by the `openai` client, of the default model: near what is near in meaning."""

from __future__ import annotations

import numpy as np
import openai
import pytest

from clients.conftest import MODEL
from server.conftest import Server

pytestmark = pytest.mark.slow


def test_vectors_of_the_default_model(client_server: Server) -> None:
    client = openai.OpenAI(base_url=f"{client_server.url}/v1", api_key="none", max_retries=0)
    texts = ["A cat sleeps on the sofa.", "A kitten is sleeping on the couch.", "Shares fell sharply on Monday."]
    done = client.embeddings.create(model=MODEL, input=texts)
    cat, kitten, shares = (np.asarray(one.embedding) for one in done.data)
    assert abs(float(cat @ cat) - 1) < 1e-5
    assert cat @ kitten > cat @ shares
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert np.allclose(floats.data[0].embedding, cat, atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MODEL, input=texts, dimensions=32)
