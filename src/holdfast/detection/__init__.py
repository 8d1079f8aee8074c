"""Who is hung: heartbeats of the workers, and what they are judged by. Dead is easy, and somebody else's work."""
