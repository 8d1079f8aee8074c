"""The contract of contract.py on etcd: one member, and three."""

from __future__ import annotations

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster

from .contract import LedgerContract, LedgerFactory
from .etcd_serving import EtcdFactory

pytestmark = pytest.mark.xdist_group("etcd")


class TestOneMember(LedgerContract):
    @pytest.fixture
    def factory(self, one_member: EtcdCluster) -> LedgerFactory:
        return EtcdFactory(one_member.url)


class TestThreeMembers(LedgerContract):
    @pytest.fixture
    def factory(self, three_members: EtcdCluster) -> LedgerFactory:
        return EtcdFactory(three_members.url)
