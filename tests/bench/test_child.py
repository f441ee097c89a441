"""Measuring in a process of its own."""

from concurrent.futures.process import BrokenProcessPool

import pytest
from bench.made_up import interrupted

from longspan.bench.benchmark import find
from longspan.bench.child import peak_growth


def test_ctrl_c_ends_a_child_without_a_traceback(capfd):
    case = find("attention").jobs(device="cpu", dtype="float32", quick=True)[0].case
    with pytest.raises(BrokenProcessPool):  # where nobody interrupted this process, too
        peak_growth(interrupted, case, "forward", 1)
    assert "Traceback" not in capfd.readouterr().err
