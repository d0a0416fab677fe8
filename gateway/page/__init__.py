"""The web page of the gateway, and what every page of ours shares: its look, and how text becomes nodes."""
