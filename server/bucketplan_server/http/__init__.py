"""HTTP: the pure-ASGI front, content negotiation, and the routes of the FastAPI application behind it."""
