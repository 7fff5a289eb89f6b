"""Which addresses others can be told."""

from __future__ import annotations

import pytest
from outrider.address import check_address, check_advertised

WILDCARDS = ["0.0.0.0:7000", "[::]:7000", ":::7000", "[::0]:7000", "*:7000", "0:7000"]


@pytest.mark.parametrize("address", ["10.0.0.7:7000", "[::1]:7000", "router-0.routers.svc:7000", "0.0.0.1:1"])
def test_an_address_of_one_process_is_told(address: str) -> None:
    check_address("address", address)
    check_advertised("advertise", "", address)
    check_advertised("advertise", address, "0.0.0.0:0")


@pytest.mark.parametrize("address", [*WILDCARDS, "", "7000", ":7000", "host:", "host:0", "host:x", "host:70000"])
def test_what_nobody_could_reach_is_refused_by_the_name_of_its_field(address: str) -> None:
    with pytest.raises(ValueError, match=r"^advertise: "):
        check_address("advertise", address)


@pytest.mark.parametrize("listen", WILDCARDS)
def test_who_listens_on_all_interfaces_has_to_say_where_to_reach_it(listen: str) -> None:
    with pytest.raises(ValueError, match=r"^router\.advertise: needed where"):
        check_advertised("router.advertise", "", listen)
