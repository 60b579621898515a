"""The bucketplan service: HTTP, planning once, stores, audit and pages; never imports torch."""
