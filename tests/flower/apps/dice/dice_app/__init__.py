"""dice: what the tests of the Simulation Engine run."""
