"""Everything between two processes: addresses, sockets, proof, frames, greetings, acceptor, dialling, groups, bytes."""
