"""Which tests are for `make test`, and which for `make test-all` alone. It imports no framework."""

from __future__ import annotations

from typing import Any

import pytest


def in_test_all(*values: Any) -> list[Any]:
    """Parameters of a test that `make test` does without, and `make test-all` adds; of several arguments, as tuples."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.long) for v in values]
