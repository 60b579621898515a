"""Checking that history is what it says: the event chain, every digest, and every plan planned again."""

from bucketplan_server.audit.verify import Finding, Verification, verify

__all__ = ["Finding", "Verification", "verify"]
