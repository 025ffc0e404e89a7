"""What is measured of representations: effective ranks, clusters."""
