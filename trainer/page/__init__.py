"""The web page for runs: it reads folders while they are written, writes none of what they hold, and trusts no text."""
