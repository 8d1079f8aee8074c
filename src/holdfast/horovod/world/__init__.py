"""Which workers are one world of ranks, and how one comes together again when somebody is lost, comes or goes."""
