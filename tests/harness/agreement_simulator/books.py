"""What really happened in a simulated schedule, and the promises that it is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.byzantine.agreement.canonical import digest_of
from holdfast.byzantine.agreement.statements import Attest, Claim, Header, Record
from tests.harness.agreement_simulator.schedule import Violation
from tests.harness.agreement_simulator.servers import combine

if TYPE_CHECKING:
    from tests.harness.agreement_simulator.clients import Client
    from tests.harness.agreement_simulator.servers import Server
    from tests.harness.agreement_simulator.world import World


class Books:
    def __init__(self, world: World) -> None:
        self._world = world
        self._headers: dict[int, Header] = {}  # of each round, as the first honest server published it
        self._signed: dict[tuple[str, int], dict[bytes, bytes]] = {}  # client, round -> digest -> content
        self._models: dict[bytes, bytes] = {digest_of(world.first_model): world.first_model}
        self._decided: dict[int, bytes] = {}  # of each round, the value that an honest server first saw decided
        self._attested: dict[int, dict[str, frozenset[tuple[str, bytes]]]] = {}  # round -> server -> its first claims
        self.published = 0
        self.later_views = 0

    def signed(self, claim: Claim, content: bytes) -> None:
        self._signed.setdefault((claim.client, claim.round), {})[claim.digest] = content

    def attested(self, server: Server, attest: Attest) -> None:
        held = frozenset((claim.client, claim.digest) for claim in attest.claims)
        self._attested.setdefault(attest.round, {}).setdefault(server.name, held)

    def decided(self, server: Server, round: int, digest: bytes) -> None:
        known = self._decided.setdefault(round, digest)
        if known != digest:
            raise Violation(f"{server} sees another value of round {round} decided than an honest server did before")

    def appended(self, server: Server, record: Record) -> None:
        header = record.header
        self.published += 1
        self.decided(server, header.round, header.value)
        if header.round != server.rounds:
            raise Violation(f"{server} publishes round {header.round} as its record {server.rounds}")
        if header.round not in self._headers:
            self._check(record)
            self._headers[header.round] = header
            self.later_views += record.commits[0].view > 0
        elif self._headers[header.round] != header:
            raise Violation(f"{server} publishes {header}, and another has {self._headers[header.round]}")

    def _check(self, record: Record) -> None:
        """The set is of registered clients' signed updates, one each, and the model is what they come to."""
        header = record.header
        before = self._headers.get(header.round - 1)
        parent = digest_of(self._world.first_model) if before is None else before.model
        if before is not None and header.parent != before.digest:
            raise Violation(f"round {header.round} does not follow the round before it")
        entries = self._world.checker.contents(record.value).entries
        updates = []
        for claim in entries:
            found = self._signed.get((claim.client, header.round), {})
            if claim.client not in self._world.federation.clients or claim.digest not in found:
                raise Violation(f"the set of round {header.round} has {claim}, which {claim.client} never signed")
            updates.append(found[claim.digest])
        for claim in (one for pair in self._world.checker.contents(record.value).dropped for one in pair):
            if claim.digest not in self._signed.get((claim.client, header.round), {}):
                raise Violation(f"round {header.round} drops {claim.client}, which did not sign {claim}")
        if len({claim.client for claim in entries}) != len(entries):
            raise Violation(f"the set of round {header.round} has two updates of one client")
        inside = {(claim.client, claim.digest) for claim in entries}
        dropped = {one.client for one, _ in self._world.checker.contents(record.value).dropped}
        held = frozenset.intersection(*self._attested[header.round].values())
        if left_out := [one for one in sorted(held - inside) if one[0] not in dropped]:
            raise Violation(f"round {header.round} leaves out {left_out}, which all honest servers held")
        model = combine(self._models[parent], updates)
        if digest_of(model) != header.model:
            raise Violation(f"the model of round {header.round} is not what its set comes to")
        self._models[header.model] = model

    def accepted(self, client: Client, record: Record) -> None:
        """A client may be the first to see f+1 results together: then the servers must publish the same."""
        header = record.header
        if header.round not in self._headers:
            self._check(record)
            self._headers[header.round] = header
        elif self._headers[header.round] != header:
            raise Violation(f"{client.name} accepts {header}, and the servers have {self._headers[header.round]}")
