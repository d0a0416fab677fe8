# One rank, on each of its starts: a run that has begun is resumed. All ranks meet before rank 0 writes run.json, so
# that they decide alike.
set -eu
if [ "$(cat "$MTRL_EXIT_CODE_FILE")" = 2 ]; then
    exit 2  # The pod is about to end.
fi
set -- mtrl-train --config "$MTRL_FILES/run.yaml" --out "$MTRL_RUN"
if [ -n "$MTRL_ENGINE" ]; then
    set -- "$@" --engine "$MTRL_ENGINE"
fi
if [ -e "$MTRL_RUN/run.json" ]; then
    set -- "$@" --resume
fi
# Rollout workers are dealt over the pods: the first rank of each starts its share of them, which ends with it.
if [ "$MTRL_WORKERS" -gt 0 ] && [ "$LOCAL_RANK" = 0 ]; then
    mtrl-train node-workers --connect "$MASTER_ADDR:$MTRL_WORKERS_PORT" --workers "$MTRL_WORKERS" --node "$GROUP_RANK" \
        --nodes "$GROUP_WORLD_SIZE" --parent $$ --silent "$MTRL_WORKERS_SILENT_S" --logs "$MTRL_LOGS" &
fi
if [ "$RANK" != 0 ]; then
    unset MTRL_WORKER_TOKEN
elif [ "$MTRL_WORKERS" -gt 0 ]; then
    export MTRL_PLACED_WORKERS="$POD_IP:$MTRL_WORKERS_PORT"
fi
exec sh "$MTRL_FILES/log.sh" "$MTRL_LOGS/rank-$RANK.log" "$@"
