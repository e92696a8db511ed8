"""The virtual-time runtime: the engine, emulated links, compute times, outages and scenarios."""
