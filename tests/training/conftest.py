"""Processes that the tests of training share."""

import tempfile
from collections.abc import Iterator

import pytest

from helpers.training_processes import TrainingProcesses


@pytest.fixture(scope="session")
def processes() -> Iterator[TrainingProcesses]:
    with tempfile.TemporaryFile() as errors:
        processes = TrainingProcesses(errors)
        with processes.process:
            yield processes
