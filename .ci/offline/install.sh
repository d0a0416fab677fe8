#!/usr/bin/env bash
# Installs an offline bundle: bash install.sh TARGET [PYTHON]
# PYTHON (default: python3) is the one that has torch. Run again as further parts arrive; what is installed stays.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: bash install.sh TARGET [PYTHON]" >&2; exit 2; }
exec "${2:-python3}" "$(dirname "$0")/install.py" "$1"
