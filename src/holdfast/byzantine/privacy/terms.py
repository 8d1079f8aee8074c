"""What all who take part in a masked round have agreed on, and how many shares open a secret.

**The threshold** of a bucket of m is the smallest number above (m + c) / 2, where c of its members may act together
with the server. An honest member gives away its share of a peer's self mask or of its key, never both. Whoever wants
both must be given t shares twice: by m - c honest members once and by c twice, so 2t <= m + c. That is why a server
that tells members different lists of survivors still opens no survivor's update.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.byzantine.privacy.fixed_point import Encoding
from holdfast.core.errors import ConfigError

SMALLEST = 2  # a bucket of one is an update in the open
CLIENTS_MAX = 10_000
NUMBERS_MAX = 1 << 28


@dataclass(frozen=True)
class Terms:
    """`numbers`: of an update. `colluding`: members of one bucket that may act together with the server."""

    buckets: int
    numbers: int
    encoding: Encoding
    colluding: int = 0

    def threshold(self, members: int) -> int:
        return (members + self.colluding) // 2 + 1

    @property
    def smallest(self) -> int:
        """Of a bucket: two members at least whose sum is seen by nobody who colludes."""
        return SMALLEST + self.colluding

    @property
    def content_bytes(self) -> int:
        return self.numbers * self.encoding.number_bytes

    def checked(self, clients: int) -> Terms:
        """ConfigError if these cannot hold for so many clients."""
        if self.buckets < 1 or self.colluding < 0:
            raise ConfigError(
                f"{self.buckets} buckets with {self.colluding} that collude is no number", hint="1 bucket or more"
            )
        if not self.smallest * self.buckets <= clients <= CLIENTS_MAX:
            raise ConfigError(
                f"{clients} clients cannot be dealt into {self.buckets} buckets of at least {self.smallest}: "
                "a smaller bucket's sum hides nothing",
                hint=f"at most {clients // self.smallest} buckets, or more clients",
            )
        if not 1 <= self.numbers <= NUMBERS_MAX:
            raise ConfigError(f"an update of {self.numbers} numbers cannot be masked", hint=f"1 to {NUMBERS_MAX}")
        largest = -(-clients // self.buckets)
        if not self.encoding.is_sound(largest):
            raise ConfigError(
                f"the sum of {largest} numbers can leave the range of {self.encoding}",
                hint="Encoding.fitting chooses one that it cannot leave",
            )
        return self
