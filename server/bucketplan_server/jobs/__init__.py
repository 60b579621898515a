"""Job attempts: opening them under an epoch, and what their ranks reported."""
