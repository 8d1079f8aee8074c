"""What is said between the announcement of bulk data and the data goes behind it, and is not taken for it."""

from __future__ import annotations

from connected_pairs import MEMBERS, WAIT_S, tcp_pair, two_groups

from holdfast.membership.codec import encode
from holdfast.membership.messages import Done, Ready, Stored
from holdfast.net.groups import Group, Said

A, B = MEMBERS
FIRST, SECOND = Stored("rank-0", b"here"), Stored("rank-1", b"there")


def messages(one: Group, count: int, known: list[object]) -> list[object]:
    while len(known) < count:
        news = [item for item in one.poll(WAIT_S) if isinstance(item, Said)]
        assert news, "nothing came"
        known += [item.message for item in news]
    return known


def test_a_word_to_all_waits_until_the_announced_data_is_sent() -> None:
    left, right = two_groups(*tcp_pair())
    out, into = bytes(range(200)), bytearray(200)
    left.send(B, encode(Ready(3, ()), {"bulk": 1}), bulk=True)
    assert left.broadcast(encode(FIRST)) == []
    left.exchange([(B, [memoryview(out)])], [], interrupted=lambda: "")
    left.broadcast(encode(SECOND))
    assert messages(right, 1, []) == [Ready(3, ())]
    right.exchange([], [(A, [memoryview(into)])], interrupted=lambda: "")
    assert into == out
    assert left.resume(B) == []
    left.broadcast(encode(Done(3)))
    resumed = [item.message for item in right.resume(A) if isinstance(item, Said)]
    assert messages(right, 3, resumed) == [FIRST, SECOND, Done(3)]
    for one in (left, right):
        one.close()


def test_data_that_is_not_needed_holds_up_no_word() -> None:
    """A step that changes nothing is announced as any other."""
    left, right = two_groups(*tcp_pair())
    left.send(B, encode(Ready(3, ()), {"bulk": 1}), bulk=True)
    left.broadcast(encode(Done(3)))
    assert left.release(B) is None
    assert messages(right, 1, []) == [Ready(3, ())]
    resumed = [item.message for item in right.resume(A) if isinstance(item, Said)]
    assert messages(right, 1, resumed) == [Done(3)]
    for one in (left, right):
        one.close()
