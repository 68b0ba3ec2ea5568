"""The user that the kernel names: a number that stands for all users without one is nobody's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvgrpc.datapath.own_user import is_own_user, maps_all

ASK = "import os; from kvgrpc.datapath.own_user import is_own_user; print(os.geteuid(), is_own_user(os.geteuid()))"


def test_only_this_process_s_user_is_its_own() -> None:
    assert is_own_user(os.geteuid())
    assert not is_own_user(os.geteuid() + 100_000)  # uid 0 of another user namespace, as it is seen here


def test_a_user_namespace_maps_all_users_only_if_none_is_left_out() -> None:
    assert maps_all("         0          0 4294967295\n")
    assert not maps_all("         0     100000      65536\n")
    assert not maps_all("")


def test_where_users_have_no_number_the_number_for_all_of_them_is_nobody_s_own() -> None:
    child = subprocess.run(["unshare", "-U", sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    if child.returncode:
        pytest.skip(f"no user namespace can be made: {child.stderr.strip()}")
    assert child.stdout.split() == ["65534", "False"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not maps_all(Path("/proc/self/uid_map").read_text()), reason="this is another user namespace")
def test_in_the_first_user_namespace_that_number_is_a_user_like_others() -> None:
    # It becomes the other user when all is imported, because that user may not see the folder of this clone.
    become = ASK.replace("print(", "os.setgroups([]); os.setuid(65534); print(")
    child = subprocess.run([sys.executable, "-c", become], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["65534", "True"]
