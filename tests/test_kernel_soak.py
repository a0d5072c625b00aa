"""A short soak on kernels. `make soak ARGS=--kernels` runs the long one."""

import pytest

pytest.importorskip("numba")

from tests import soak


@pytest.mark.nightly
def test_100_requests_on_kernels(capsys, monkeypatch, request):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(request.config.cache.mkdir("kernels")))
    assert soak.main(["--kernels", "--requests", "100", "--seed", "5"]) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert output.startswith("100 requests in ") and "no fault" in output and " 0 raised" not in output
