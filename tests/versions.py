"""What differs between the versions of what the tests run with, and is no fault of anyone here."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


def older(package: str, than: str) -> bool:
    """Is the installed one older? Not where there is none."""
    try:
        return Version(version(package)) < Version(than)
    except PackageNotFoundError:
        return False


# Rotary angles are products of matrices there, for which positions are kept as fp32 numbers.
FLOAT_POSITIONS = older("transformers", "5.19")
# Experts there write zeros over what goes to no expert, and keep the mask: a byte for each of a
# token's experts.
MASKED_EXPERTS = older("transformers", "5.23")
# GPT-J and CodeGen have an attention of their own there.
OWN_ATTENTION = older("transformers", "5.24")
# Triton 3.6 reads numbers in its interpreter in a way that NumPy refuses from 2.4 on.
CANNOT_INTERPRET = older("triton", "3.7") and not older("numpy", "2.4")
