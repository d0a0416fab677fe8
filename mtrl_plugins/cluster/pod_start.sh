# Starts the ranks of one pod: torchrun agrees with the other pods on who is which rank, and starts all of them again
# when one fails. Job, servers and run folder come by environment, from the manifest.
set -eu
wait_for() {  # In the background: a shell that waits for a program in the foreground heeds no signal.
    mtrl-train "$@" &
    waiting=$!
    trap 'kill -TERM "$waiting" 2>/dev/null || true; exit 143' INT TERM
    wait "$waiting" || exit 1
}
if [ -n "$MTRL_ENGINE" ]; then
    # shellcheck disable=SC2046
    wait_for wait-for-servers --within "$MTRL_SERVERS_START_S" $(echo "$MTRL_ENGINE" | tr ',' ' ')
fi
if [ -n "${MTRL_SANDBOXES:-}" ]; then
    wait_for wait-for-sandboxes --within "$MTRL_SERVERS_START_S"
fi
is_host=false
if [ "$NODE_RANK" = 0 ]; then
    is_host=true
fi
MTRL_EXIT_CODE_FILE=$(mktemp)  # Rank 0, wherever it runs, writes its exit code there.
export MTRL_EXIT_CODE_FILE
# Without this, agents of torch 2.13 that stay never tell a pod that comes back where the ranks meet, and all end.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes "$MTRL_NODES" --nproc-per-node "$MTRL_RANKS_EACH" --max-restarts "$MTRL_RETRIES" \
    --rdzv-backend c10d --rdzv-endpoint "$MTRL_RENDEZVOUS" --rdzv-id "$MTRL_JOB" \
    --rdzv-conf "is_host=$is_host,join_timeout=$MTRL_SERVERS_START_S" --local-addr "$POD_IP" \
    --no-python sh "$MTRL_FILES/rank.sh" &
agent=$!
trap 'kill -TERM "$agent" 2>/dev/null || true' INT TERM
# torchrun starts ranks again whatever their exit code is. With code 2 they would end alike: the pod and its job end.
while kill -0 "$agent" 2>/dev/null; do
    if [ "$(cat "$MTRL_EXIT_CODE_FILE")" = 2 ]; then
        kill -TERM "$agent" 2>/dev/null || true
        break
    fi
    sleep 1 &
    wait $! || true
done
code=0
wait "$agent" || code=$?
if [ "$(cat "$MTRL_EXIT_CODE_FILE")" = 2 ]; then
    echo "mtrl: another start would end alike, so the job ends: see $MTRL_LOGS/rank-0.log" >&2
    exit 2
fi
exit "$code"
