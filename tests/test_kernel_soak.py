"""The soak on kernels in short: `make soak ARGS=--kernels` is the long one."""

import pytest

pytest.importorskip("numba")

from tests import soak


@pytest.mark.full
def test_a_hundred_requests_on_kernels(capsys, monkeypatch, request):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(request.config.cache.mkdir("kernels")))
    assert soak.main(["--kernels", "--requests", "100", "--seed", "5"]) == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert told.startswith("100 requests in ") and "no fault" in told and " 0 raised" not in told
