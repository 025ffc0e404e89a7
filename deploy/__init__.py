"""Where and how big: launcher components and manifests. Imports nothing else of the project."""
