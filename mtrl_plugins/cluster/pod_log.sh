# Runs a command whose output goes to a log on the shared volume and to the container's own: log.sh FILE COMMAND...
set -eu
mkdir -p "$(dirname "$1")"
pipes=$(mktemp -d)
mkfifo "$pipes/output"
(trap '' INT TERM && exec tee -a "$1" <"$pipes/output") &  # Ends with the command, after its last words.
exec >"$pipes/output" 2>&1
rm -r "$pipes"
shift
export MTRL_OUTPUT_KEPT=1
exec "$@"
