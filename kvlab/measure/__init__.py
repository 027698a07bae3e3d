"""Layer 3: measuring. schedule: which arm when. timer: how long a replay takes. telemetry: what the card did."""
