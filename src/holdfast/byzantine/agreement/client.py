"""A client of 3f+1 servers of which f may lie: `submit` an update, `await_model` of the round.

An update is signed, and goes to all servers. A model counts when f+1 servers have signed it: then one of them is
honest. Each server has a thread that asks and is answered; a server that lies or does not answer costs its own
thread's time and nobody else's. The client remembers nothing on disk: one that starts again must not sign another
update for a round that it has taken part in, or the servers drop it from that round, with both signatures as proof.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from holdfast.byzantine.agreement import messages as m
from holdfast.byzantine.agreement.aggregating import State, decode_state, encode_state
from holdfast.byzantine.agreement.canonical import decode, digest_of, encode
from holdfast.byzantine.agreement.checking import Checker, Signer
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.links import CLIENTS, DIAL_AGAIN_S, MESSAGE_EXTRA_BYTES, dial
from holdfast.byzantine.agreement.signing import verify
from holdfast.byzantine.agreement.statements import Claim, Record
from holdfast.core.errors import ConfigError, PeerError, ProtocolError, RoundOver
from holdfast.net.framing import frame
from holdfast.net.streams import Deadline, receive_frame, send
from holdfast.trust.keys import Keys

ANSWER_S = 20.0
ASK_AGAIN_S = 0.05
FETCH_S = 5.0  # so long a server may take to send a model before another one is asked


class Client:
    """`key` signs; its public key must be registered under this name. Close it, or use it in a `with`."""

    def __init__(
        self, name: str, key: Signer, federation: Federation, addresses: Mapping[str, str], keys: Keys, *, public: bytes
    ) -> None:
        if federation.clients.get(name) != public:
            raise ConfigError(
                f"the key of client {name!r} is not registered in the federation {federation.name!r}",
                hint="register its public key in federation.json before the federation is started",
            )
        self.name = name
        self.federation = federation
        self._sign = key
        self._checker = Checker(federation, verify)
        self._changed = threading.Condition()
        self._submitted: m.Submit | None = None
        self._answers: dict[str, m.Accepted | m.Refused] = {}  # to what is submitted
        self._awaited = 0
        self._record: Record | None = None  # of the awaited round
        self._fetched_by: tuple[str, float] = ("", 0.0)
        self._model: bytes | None = None
        self._closed = False
        self.sent_bytes = self.received_bytes = 0
        self._lines = [
            threading.Thread(target=self._talk, args=(server, address, keys), name="holdfast-client-line", daemon=True)
            for server, address in addresses.items()
        ]
        for line in self._lines:
            line.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def submit(self, round: int, update: State, *, timeout_s: float = 60.0) -> None:
        """Sign an update and send it to all servers. Returns when f+1 have it on disk; the others get it meanwhile.

        RoundOver if f+1 servers are done with the round (its record says whether others had the update in time and it
        counts); ConfigError if f+1 refuse it, with what they say; PeerError if too few answer in time.
        """
        self.submit_bytes(round, encode_state(update), timeout_s=timeout_s)

    def submit_bytes(self, round: int, content: bytes, *, timeout_s: float = 60.0) -> None:
        claim = Claim(self.name, round, digest_of(content))
        claim = replace(claim, signature=self._sign(self._checker.said(claim.said)))
        enough = self.federation.witnesses_needed
        with self._changed:
            self._submitted, self._answers = m.Submit(claim, content), {}
            self._changed.notify_all()
            # A kind of answer counts when f+1 servers gave it: one of them is honest.
            self._changed.wait_for(
                lambda: self._closed or max(len(self._accepted()), len(self._late()), len(self._refused())) >= enough,
                timeout_s,
            )
            accepted, late, refused = self._accepted(), self._late(), self._refused()
            if len(accepted) >= enough:
                return
            if max(len(late), len(refused)) >= enough:
                self._submitted = None
            if len(late) >= enough:
                raise RoundOver(f"client {self.name!r} was late: {late[0]}")
            if len(refused) >= enough:
                raise ConfigError(f"the servers refuse the update: {refused[0]}", hint="send one update a round")
            if self._closed:
                raise PeerError(f"client {self.name!r} was closed before f+1 servers took the update")
            raise PeerError(f"{len(accepted)} servers took the update within {timeout_s} s")

    def _accepted(self) -> list[m.Accepted]:
        return [one for one in self._answers.values() if isinstance(one, m.Accepted)]

    def _late(self) -> list[str]:
        return [one.reason for one in self._answers.values() if isinstance(one, m.Refused) and one.late]

    def _refused(self) -> list[str]:
        answers = self._answers.values()
        return [one.reason for one in answers if isinstance(one, m.Refused) and not one.again and not one.late]

    def await_model(self, round: int, *, timeout_s: float = 600.0) -> dict[str, torch.Tensor]:
        """The model of this round, which f+1 servers have signed. PeerError if there is none in time."""
        return decode_state(self.await_model_bytes(round, timeout_s=timeout_s))

    def await_model_bytes(self, round: int, *, timeout_s: float = 600.0) -> bytes:
        with self._changed:
            self._awaited, self._record, self._model = round, None, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._model is not None or self._closed, timeout_s)
            self._awaited, model = 0, self._arrived()
            if model is None:
                raise PeerError(f"no model of round {round} that f+1 servers signed within {timeout_s} s")
            return model

    def _arrived(self) -> bytes | None:
        return self._model

    # ---- a server's line

    def _talk(self, server: str, address: str, keys: Keys) -> None:
        while not self._closed:
            try:
                sock = dial(address, keys, CLIENTS, self.name)
            except PeerError:
                self._pause(DIAL_AGAIN_S)
                continue
            try:
                while not self._closed:
                    self._exchange(server, sock)
            except (PeerError, OSError):
                self._pause(DIAL_AGAIN_S)
            finally:
                sock.close()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _exchange(self, server: str, sock: socket.socket) -> None:
        """What is due with this server: an update, a question, the bytes of a model."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._owes(server) or self._awaited > 0)
            submit = self._submitted if self._owes(server) else None
            awaited, record = self._awaited, self._record
        if self._closed:
            return
        if submit is not None:
            self._answered(server, submit, self._ask(sock, submit))
        elif record is None:
            found = self._ask(sock, m.Ask(awaited))
            self._found(server, awaited, found.records if isinstance(found, m.Records) else ())
        elif self._may_fetch(server):
            blob = self._ask(sock, m.Want(record.header.model))
            self._fetched(record, blob.content if isinstance(blob, m.Blob) else b"")
        self._pause(ASK_AGAIN_S)

    def _owes(self, server: str) -> bool:
        answer = self._answers.get(server)
        return self._submitted is not None and (
            answer is None or (isinstance(answer, m.Refused) and bool(answer.again))
        )

    def _ask(self, sock: socket.socket, message: m.Message) -> m.Message:
        deadline = Deadline(ANSWER_S, 2 * ANSWER_S)
        said = frame(encode(message))
        send(sock, deadline, [memoryview(said)])
        body = receive_frame(sock, deadline, self.federation.update_bytes_max + MESSAGE_EXTRA_BYTES)
        if body is None:
            raise PeerError("the server closed the connection")
        with self._changed:
            self.sent_bytes, self.received_bytes = self.sent_bytes + len(said), self.received_bytes + len(body)
        return decode(body, m.KINDS)

    def _answered(self, server: str, submit: m.Submit, answer: m.Message) -> None:
        if not isinstance(answer, m.Accepted | m.Refused):
            raise ProtocolError("an answer to something else")
        with self._changed:
            if self._submitted is submit:
                self._answers[server] = answer
                self._changed.notify_all()

    def _found(self, server: str, round: int, records: tuple[Record, ...]) -> None:
        for record in records:
            if record.header.round == round and not self._checker.results(record):
                with self._changed:
                    if self._awaited == round and self._record is None:
                        self._record = record
                return

    def _may_fetch(self, server: str) -> bool:
        """One server at a time sends the bytes, for as long as it may take."""
        with self._changed:
            by, since = self._fetched_by
            if self._model is not None or (by != server and time.monotonic() - since < FETCH_S):
                return False
            self._fetched_by = (server, time.monotonic())
            return True

    def _fetched(self, record: Record, content: bytes) -> None:
        with self._changed:
            self._fetched_by = ("", 0.0)
            if self._record is record and digest_of(content) == record.header.model:
                self._model = content
                self._changed.notify_all()
