"""Tests of logs: durable segments, and the machine of a replicated log, alone and in the simulator."""
