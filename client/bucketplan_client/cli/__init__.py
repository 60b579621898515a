"""The command line `bucketplan`: what people ask the planning service, over HTTP only."""
