"""Whether the host at the other end of a TCP connection still answers, as its kernel and ours know it.

A process that dies closes its connections, and a peer sees that at once. A host that loses power or its network says
nothing. Then what we send is never acknowledged, though a process that is merely stopped or busy has a kernel that
acknowledges for it. So: data is on its way or the other side's full window was asked about, and not one packet came
from there for SILENT_S.
"""

from __future__ import annotations

import socket
import struct

SILENT_S = 3.0
LOOK_S = 0.5  # between two looks; a host is given up when two in a row find it silent

# struct tcp_info of Linux, as far as it is used: eight bytes of which the fourth counts unanswered probes, then
# milliseconds and counts of four bytes each.
_INFO = struct.Struct("=3xB4x 16xI 24xII")


def is_silent(sock: socket.socket) -> bool:
    """Whether this connection waits for an answer from a host that has sent nothing for SILENT_S."""
    if sock.family == socket.AF_UNIX:
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        probes, unacknowledged, data_ms, acknowledgement_ms = _INFO.unpack_from(info)
    except (OSError, struct.error):
        return False  # it is closed, which is seen when it is read
    return bool(unacknowledged or probes) and min(data_ms, acknowledgement_ms) >= SILENT_S * 1000
