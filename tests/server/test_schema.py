"""Requests made up from the OpenAPI document: whatever they are, an answer comes, of the form that was promised."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from phonograph.server.app import OPERATIONS
from phonograph.server.openapi import document
from server.conftest import Server

schema = schemathesis.openapi.from_dict(document(OPERATIONS))


@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_promised(case: schemathesis.Case[Any], tiny_server: Server) -> None:
    # What the document can't say (the context, the vocabulary, which fields exclude each other) may be refused.
    case.call_and_validate(base_url=tiny_server.url, excluded_checks=[positive_data_acceptance], timeout=30)
