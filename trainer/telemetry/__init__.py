"""What a run reports while it trains: console, alerts, Prometheus, TensorBoard."""
