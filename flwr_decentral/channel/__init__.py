"""The real-time runtime: machines that gossip between processes and hosts."""
