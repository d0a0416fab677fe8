"""Starts the router that PyPI has as `sglang-router`: SGLang's own Python runs this file, without importing SGLang."""

from __future__ import annotations

import argparse

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

if __name__ == "__main__":
    options = argparse.ArgumentParser()
    RouterArgs.add_cli_args(options)
    Router.from_args(RouterArgs.from_cli_args(options.parse_args())).start()
