"""The embedded engine: continuous batching and a cache of shared prefixes, on a model in this process."""
