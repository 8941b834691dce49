"""A server that the tests of its answers and of its page share."""

from collections.abc import Iterator

import pytest

from helpers.command import serving


@pytest.fixture(scope="session")
def served() -> Iterator[str]:
    """Its address."""
    with serving() as (address, _):
        yield address
