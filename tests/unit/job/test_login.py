"""Names of hosts that become words of a command line."""

from __future__ import annotations

import pytest

from monarch.job.login import check_hosts


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "a b", "a\n"])
def test_what_is_no_name_of_a_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is no name of a host"):
        check_hosts(["node1", host])


def test_names_of_hosts() -> None:
    check_hosts(["node1", "ann@node-2.example.org", "10.0.0.1"])
    with pytest.raises(TypeError, match="must be a list of names"):
        check_hosts("node1")
