from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.seaweed import S3Server


@pytest.fixture(scope="session")
def s3(shared_s3: S3Server) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shared_s3.environment().items():
            patch.setenv(name, value)
        yield shared_s3
