"""The demo of shell tasks: Harbor tasks that are generated, each played in a sandbox with a root."""
