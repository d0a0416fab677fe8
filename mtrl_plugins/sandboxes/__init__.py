"""Providers of sandboxes besides bubblewrap: containers, and servers of sandboxes on other machines.

`sandbox: {container: {image: ...}}` runs the tools `python`, `shell` and `files` in Podman or Docker, and
`sandbox: {remote: {url: ...}}` on a machine where `mtrl-gateway sandboxes` runs.
"""
