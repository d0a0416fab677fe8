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
exec sh "$MTRL_FILES/log.sh" "$MTRL_LOGS/rank-$RANK.log" "$@"
