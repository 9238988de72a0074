"""GEMMs: the checks of a call, its plan, the choice of its kernel, the launch, the reference."""
