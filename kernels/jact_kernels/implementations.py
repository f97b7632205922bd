"""The choice among a kernel's implementations, in one place so that every kernel words it alike."""

CHOICES = (None, "auto", "xla")


def check_implementation(implementation: str | None) -> None:
    """Checks the name of an implementation.

    Args:
      implementation: None or "auto" (the best one for the device) or "xla" (plain JAX).

    Raises:
      ValueError: the name is not one of these.

    Example:
      >>> from jact_kernels.implementations import check_implementation
      >>> check_implementation("xla")
    """
    if implementation not in CHOICES:
        raise ValueError(f"implementation must be one of {CHOICES}, got {implementation!r}")
