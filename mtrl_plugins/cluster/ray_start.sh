# The entry point of a RayJob, on the head: starts the ranks, and the servers if there are any, on the Ray cluster.
set -eu
set -- mtrl-train --ray auto --ranks "$MTRL_RANKS" --ray-servers "$MTRL_SERVERS" \
    --config "$MTRL_FILES/run.yaml" --out "$MTRL_RUN"
if [ -e "$MTRL_RUN/run.json" ]; then
    set -- "$@" --resume
fi
exec "$@"
