"""How a replica finds the next primary: it seals the epoch at a majority, and proposes whoever has the newest log.

A replica that has sealed an epoch takes nothing of it any more, so what a majority has reported cannot be added to.
What was acknowledged is at a majority too, so at least one report has it, and the newest log among them has all of it.
"""

from __future__ import annotations

from holdfast.log.configuration import Configuration, LogEnd, newest
from holdfast.log.messages import Effect, Propose, Seal, Send, Tell
from holdfast.log.rules import Rules


class Candidacy:
    """One replica's attempt to end an epoch. It lasts until the next epoch is known."""

    def __init__(self, me: str, configuration: Configuration, rules: Rules, *, released: bool, reason: str) -> None:
        self._me = me
        self.configuration = configuration
        self._rules = rules
        self.released = released
        self.reason = reason
        self._reports: dict[str, LogEnd] = {}
        self._asked_at: float | None = None
        self._proposed_at: float | None = None

    @property
    def missing(self) -> int:
        """So many reports are missing to a majority."""
        return max(0, self.configuration.majority - len(self._reports))

    def report(self, server: str, end: LogEnd) -> None:
        if server in self.configuration.replicas:
            self._reports[server] = end

    def ask(self, now: float) -> list[Effect]:
        """Ask those that have not answered, every now and then."""
        if not self.missing or (self._asked_at is not None and now - self._asked_at < self._rules.beat_s):
            return []
        self._asked_at = now
        silent = [one for one in self.configuration.replicas if one not in self._reports and one != self._me]
        return [Send(one, Seal(self.configuration.epoch, self.released)) for one in silent]

    def propose(self, revision: int, now: float) -> list[Effect]:
        if self.missing or (self._proposed_at is not None and now - self._proposed_at < self._rules.propose_again_s):
            return []
        self._proposed_at = now
        best = newest(self._reports, self._me)
        end = self._reports[best]
        reason = (
            f"{self.reason}; of {len(self._reports)} logs that of {best} is the newest, "
            f"up to entry {end.index} of epoch {end.epoch}"
        )
        following = self.configuration.next(reason, primary=best)
        return [Tell(f"propose {best} for epoch {following.epoch}", reason), Propose(following, revision)]
