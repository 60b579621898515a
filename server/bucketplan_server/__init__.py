"""The bucketplan service: HTTP, planning once, stores, audit and pages; never imports torch."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("bucketplan")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
